//! Selects samples by task, object and function, like `--comms`, `--dsos` and `--symbols` of
//! `perf report`.

use super::symbolize::{Symbolizer, task_label};
use super::{Profile, ProfileSample, frames};

/// Conditions on samples. Each list contains accepted values; an empty list accepts every sample.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SampleFilter {
    /// Names of accepted tasks.
    pub comms: Vec<String>,
    /// Accepted objects (files) of the innermost frame, as paths or as file names without
    /// directories.
    pub objects: Vec<String>,
    /// Names of accepted functions of the innermost frame.
    pub symbols: Vec<String>,
}

impl SampleFilter {
    /// Returns whether a sample satisfies all conditions of the filter.
    pub fn matches(
        &self,
        profile: &Profile,
        symbols: &mut Symbolizer<'_>,
        sample: &ProfileSample<'_>,
    ) -> bool {
        let accepts = |list: &[String], name: &str| list.is_empty() || list.iter().any(|n| n == name);
        if !self.comms.is_empty() {
            let comm = task_label(profile, sample.tid, sample.cr3, sample.time_ns);
            if !accepts(&self.comms, &comm) {
                return false;
            }
        }
        if self.objects.is_empty() && self.symbols.is_empty() {
            return true;
        }
        let Some(frame) = frames(sample).next() else {
            return false;
        };
        let named = symbols.name(frame, sample.pid);
        let file = named.object.rsplit('/').next().unwrap_or(&named.object);
        let object = accepts(&self.objects, &named.object) || accepts(&self.objects, file);
        object && accepts(&self.symbols, &named.name)
    }
}
