//! Reports the code without symbols at the end of a recording, with the reasons.

use std::collections::BTreeMap;

use super::super::one_line;
use guest_profile::export::Profile;
use guest_profile::export::symbolize::{GuestFileStatus, Symbolizer};

/// Maximum number of objects (programs and libraries) listed in the log.
const MAX_OBJECTS: usize = 20;

/// Numbers of recorded addresses without a name, by object (program or library).
pub(super) struct UnnamedCode<'p> {
    mapped: &'p Profile,
    /// `true` if the user specified the location of the guest's files.
    has_files: bool,
    addresses: BTreeMap<String, u64>,
}

impl<'p> UnnamedCode<'p> {
    pub(super) fn new(mapped: &'p Profile, has_files: bool) -> Self {
        Self {
            mapped,
            has_files,
            addresses: BTreeMap::new(),
        }
    }

    /// Counts an address without a name in `object`, a program or library.
    pub(super) fn add(&mut self, object: &str) {
        match self.addresses.get_mut(object) {
            Some(count) => *count += 1,
            None => {
                self.addresses.insert(object.to_owned(), 1);
            }
        }
    }

    /// Logs one line per object, with the number of addresses and the reason they have no name.
    pub(super) fn log(self, files: &mut Symbolizer<'_>) {
        let objects = self.addresses.len();
        for (object, count) in self.addresses.iter().take(MAX_OBJECTS) {
            let reason = self.reason(object, files);
            log::info!("{}: {count} addresses have no name: {reason}", one_line(object));
        }
        if objects > MAX_OBJECTS {
            log::info!(
                "{} more objects have addresses without a name",
                objects - MAX_OBJECTS
            );
        }
    }

    fn reason(&self, object: &str, files: &mut Symbolizer<'_>) -> &'static str {
        let Some(mapping) = self.mapped.mappings.iter().rev().find(|m| m.path == object) else {
            return "their process had ended before its mappings were read";
        };
        if !object.starts_with('/') || object.starts_with("//") {
            return "this memory has no file";
        }
        if !self.has_files {
            return "guest memory has exported functions only; \
                    name the guest's files with --guest-disk or --guestmount";
        }
        match files.file_symbols(object, mapping.build_id) {
            GuestFileStatus::Missing => {
                "the file cannot be read; one that the guest has just written is not on its disk before \
                 the guest's next sync, and report finds its names then"
            }
            GuestFileStatus::OtherBuild => "the file is another build than the one that the guest runs",
            GuestFileStatus::Usable => "the file has no symbols for them",
        }
    }
}

#[cfg(test)]
mod tests {
    use guest_profile::export::FileMapping;
    use guest_profile::programs::GuestSymbols;

    use super::*;

    #[test]
    fn reason_distinguishes_memory_files_and_missing_files() {
        let mut profile = Profile::default();
        for path in ["[vdso]", "/bin/json", "/bin/text"] {
            profile.mappings.push(FileMapping {
                time_ns: 0,
                pid: 7,
                start: 0x1000,
                len: 0x1000,
                file_offset: 0,
                path: path.into(),
                build_id: None,
            });
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        std::fs::write(dir.path().join("bin/text"), "no program").unwrap();
        let mut none = Symbolizer::new(&profile, None, None);
        let without = UnnamedCode::new(&profile, false);
        assert!(without.reason("/bin/json", &mut none).contains("--guest-disk"));
        assert!(without.reason("[vdso]", &mut none).contains("no file"));
        assert!(without.reason("[guest user]", &mut none).contains("had ended"));
        let mount = Some(GuestSymbols::new(dir.path()));
        let mut files = Symbolizer::new(&profile, None, mount);
        let with = UnnamedCode::new(&profile, true);
        for path in ["/bin/json", "/bin/text"] {
            assert!(with.reason(path, &mut files).contains("next sync"), "{path}");
        }
    }
}
