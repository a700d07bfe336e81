//! Writes profiles in the format of the Firefox Profiler (<https://profiler.firefox.com>).

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fxprof_processed_profile::{
    CategoryColor, CpuDelta, Frame, FrameFlags, FrameInfo, ProcessHandle, Profile as FirefoxProfile,
    ReferenceTimestamp, SamplingInterval, ThreadHandle, Timestamp,
};

use super::symbolize::{Symbolizer, task_label};
use super::{EventSamplingRate, Profile, ProfileSample, SampledEventInfo, frames};

/// Sampling interval stored in the file for an event that is sampled with a fixed period and
/// therefore has no interval: 1 ms, in nanoseconds.
const DEFAULT_INTERVAL_NS: u64 = 1_000_000;

/// Writes the samples of one event as a Firefox profile, with one track per guest thread. The
/// weight of a sample is its period divided by a common factor, because the format has 32-bit
/// weights.
///
/// # Errors
/// Returns an error if `out` fails.
pub fn write(
    profile: &Profile,
    event: &SampledEventInfo,
    symbols: &mut Symbolizer<'_>,
    out: impl Write,
) -> io::Result<()> {
    let mut order: Vec<ProfileSample<'_>> = profile.samples().filter(|s| s.event_id == event.id).collect();
    order.sort_by_key(|s| s.time_ns);
    let first_ns = order.first().map_or(0, |s| s.time_ns);
    let interval = match event.rate {
        EventSamplingRate::FrequencyHz(hz) => 1_000_000_000 / hz.max(1),
        EventSamplingRate::Period(_) => DEFAULT_INTERVAL_NS,
    };
    let start = profile.meta.clock.map_or(UNIX_EPOCH, |clock| {
        let since = Duration::from_nanos(clock.wall_clock_ns(first_ns));
        UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
    });
    let mut writer = FirefoxWriter::new(profile, start, SamplingInterval::from_nanos(interval));
    let unit = weight_unit(&order);
    for s in &order {
        let at = Timestamp::from_nanos_since_reference(s.time_ns - first_ns);
        let weight = i32::try_from(s.period.saturating_add(unit / 2) / unit).unwrap_or(i32::MAX);
        writer.add(s, at, weight.max(1), symbols);
    }
    Ok(serde_json::to_writer(out, &writer.firefox)?)
}

/// Returns the number of events that a sample weight of 1 represents. This is the smallest period
/// of a sample, or a larger number if the sum of the weights would otherwise not fit into 31 bits.
fn weight_unit(samples: &[ProfileSample<'_>]) -> u64 {
    let least = samples.iter().map(|s| s.period).filter(|p| *p > 0).min();
    let total = samples.iter().fold(0u64, |sum, s| sum.saturating_add(s.period));
    least.unwrap_or(1).max(total >> 30).max(1)
}

struct FirefoxWriter<'p> {
    profile: &'p Profile,
    firefox: FirefoxProfile,
    user: fxprof_processed_profile::CategoryHandle,
    kernel: fxprof_processed_profile::CategoryHandle,
    processes: HashMap<u32, ProcessHandle>,
    threads: HashMap<(u32, u32, String), ThreadHandle>,
}

impl<'p> FirefoxWriter<'p> {
    fn new(profile: &'p Profile, start: SystemTime, interval: SamplingInterval) -> Self {
        let name = match profile.meta.hostname.as_str() {
            "" => "guest",
            name => name,
        };
        let mut firefox = FirefoxProfile::new(name, ReferenceTimestamp::from_system_time(start), interval);
        if !profile.meta.os_release.is_empty() {
            firefox.set_os_name(&profile.meta.os_release);
        }
        // Otherwise, the Firefox Profiler looks for symbols itself.
        firefox.set_symbolicated(true);
        let user = firefox.add_category("User", CategoryColor::Yellow);
        let kernel = firefox.add_category("Kernel", CategoryColor::LightRed);
        Self {
            profile,
            firefox,
            user,
            kernel,
            processes: HashMap::new(),
            threads: HashMap::new(),
        }
    }

    fn thread(&mut self, s: &ProfileSample<'_>, at: Timestamp) -> ThreadHandle {
        let comm = task_label(self.profile, s.tid, s.cr3, s.time_ns);
        let key = (s.pid, s.tid, comm);
        if let Some(known) = self.threads.get(&key) {
            return *known;
        }
        let firefox = &mut self.firefox;
        let process = *self
            .processes
            .entry(s.pid)
            .or_insert_with(|| firefox.add_process(&key.2, s.pid, at));
        let thread = firefox.add_thread(process, s.tid, at, s.pid == s.tid);
        firefox.set_thread_name(thread, &key.2);
        self.threads.insert(key, thread);
        thread
    }

    fn add(&mut self, s: &ProfileSample<'_>, at: Timestamp, weight: i32, symbols: &mut Symbolizer<'_>) {
        let thread = self.thread(s, at);
        let mut chain: Vec<FrameInfo> = Vec::new();
        for frame in frames(s) {
            let named = symbols.name(frame, s.pid);
            let label = self.firefox.intern_string(&named.name);
            let category = if frame.kernel { self.kernel } else { self.user };
            chain.push(FrameInfo {
                frame: Frame::Label(label),
                category_pair: category.into(),
                flags: FrameFlags::empty(),
            });
        }
        let stack = self.firefox.intern_stack_frames(thread, chain.into_iter().rev());
        self.firefox.add_sample(thread, at, stack, CpuDelta::ZERO, weight);
    }
}
