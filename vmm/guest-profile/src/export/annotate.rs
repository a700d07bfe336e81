//! Shows the instructions of a function with their shares of its samples, in the format of
//! `perf annotate --stdio`.
//!
//! A profile contains only addresses. The code is read from another source and may differ from the
//! code that ran. If there are samples whose address is not the start of an instruction
//! ([`AnnotatedCode::misaligned`]), the code differs.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::rc::Rc;

use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter, Instruction};

use super::symbolize::Symbolizer;
use super::{Profile, SampledEventInfo, frames};

/// Maximum number of code bytes that are shown for a function.
pub const MAX_CODE: u64 = 64 << 10;
/// Maximum length of an instruction, in bytes (SDM vol. 2 §2.3.11).
const LONGEST: u64 = 15;

/// A function of a profile with its samples.
#[derive(Debug, Clone)]
pub struct SampledFunction {
    /// Name of the sampled function.
    pub name: String,
    /// File that contains the function.
    pub object: Rc<str>,
    /// `true` for a function of the kernel.
    pub kernel: bool,
    /// Start address of the function in process `pid`.
    pub start: u64,
    /// Exclusive end address of the function, or the address after the last sample if the end is
    /// unknown or too far away.
    pub end: u64,
    /// ID of a process that maps the function at these addresses.
    pub pid: u32,
    /// CR3 of the process `pid`, with which its code can be read; 0 if no sample of the function at
    /// `start` contains a CR3.
    pub cr3: u64,
    /// Number of samples at each offset into the function, and sum of the periods of these samples.
    pub offsets: BTreeMap<u64, (u64, u64)>,
    /// Sum of the periods of all samples in the function.
    pub period: u64,
}

/// Returns the functions that have samples of `event`, sorted by descending period.
pub fn functions(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    event: &SampledEventInfo,
) -> Vec<SampledFunction> {
    let mut found: HashMap<(Rc<str>, String), SampledFunction> = HashMap::new();
    for sample in profile.samples().filter(|s| s.event_id == event.id) {
        let Some(frame) = frames(&sample).next() else {
            continue;
        };
        let named = symbols.name(frame, sample.pid);
        if !named.known {
            continue;
        }
        let start = frame.address.wrapping_sub(named.offset);
        let key = (Rc::clone(&named.object), named.name.clone());
        let function = found.entry(key).or_insert_with(|| SampledFunction {
            name: named.name.clone(),
            object: Rc::clone(&named.object),
            kernel: named.kernel,
            start,
            end: start,
            pid: sample.pid,
            cr3: 0,
            offsets: BTreeMap::new(),
            period: 0,
        });
        // Samples taken by the host kernel have no registers, and therefore no address space from
        // which the code can be read.
        if function.cr3 == 0 && sample.cr3 != 0 && start == function.start {
            (function.pid, function.cr3) = (sample.pid, sample.cr3);
        }
        // Another process may map the function at a different address. Offsets into the function
        // are the same in all processes.
        let end = symbols.end(frame, sample.pid).unwrap_or(0).wrapping_sub(start);
        let length = (function.end - function.start).max(named.offset + 1);
        let length = if end <= MAX_CODE { length.max(end) } else { length };
        function.end = function.start.saturating_add(length);
        let at = function.offsets.entry(named.offset).or_default();
        at.0 += 1;
        at.1 = at.1.saturating_add(sample.period);
        function.period = function.period.saturating_add(sample.period);
    }
    let mut list: Vec<SampledFunction> = found.into_values().collect();
    list.sort_by(|a, b| b.period.cmp(&a.period).then_with(|| a.name.cmp(&b.name)));
    list
}

impl SampledFunction {
    /// Returns the number of code bytes to read, from the start of the function to the end of the
    /// instruction at the last sample or to the end of the function, whichever is later, but at
    /// most [`MAX_CODE`].
    pub fn length(&self) -> u64 {
        let last = self.offsets.keys().next_back().map_or(0, |last| last + LONGEST);
        (self.end - self.start).max(last).min(MAX_CODE)
    }

    /// Returns the number of samples in the function.
    pub fn samples(&self) -> u64 {
        self.offsets.values().map(|(samples, _)| samples).sum()
    }
}

/// One disassembled instruction with its samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotatedLine {
    /// Address of the disassembled instruction.
    pub address: u64,
    /// Number of samples at this instruction.
    pub samples: u64,
    /// Sum of the periods of the samples at this instruction.
    pub period: u64,
    /// Disassembled instruction in AT&T syntax.
    pub text: String,
}

/// The disassembled code of a function with its samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnotatedCode {
    /// Instructions of the function in ascending order of address.
    pub lines: Vec<AnnotatedLine>,
    /// Number of samples whose address is not the start of an instruction. If it is not 0, the
    /// disassembled code is not the code that ran.
    pub misaligned: u64,
}

/// Disassembles `code`, the code bytes of `function`, and assigns the samples to its instructions.
/// `name_of` resolves branch targets to names.
pub fn annotate(
    function: &SampledFunction,
    code: &[u8],
    mut name_of: impl FnMut(u64) -> Option<String>,
) -> AnnotatedCode {
    let mut decoder = Decoder::with_ip(64, code, function.start, DecoderOptions::NONE);
    let mut formatter = GasFormatter::new();
    formatter.options_mut().set_uppercase_hex(false);
    formatter.options_mut().set_branch_leading_zeros(false);
    let mut instruction = Instruction::default();
    let mut lines = Vec::new();
    let mut left = function.offsets.clone();
    while decoder.can_decode() && decoder.ip() < function.end {
        decoder.decode_out(&mut instruction);
        let address = instruction.ip();
        let mut text = String::new();
        if instruction.is_invalid() {
            text.push_str("(bad)");
        } else {
            formatter.format(&instruction, &mut text);
            let target = instruction.near_branch_target();
            if target != 0
                && let Some(name) = name_of(target)
            {
                let _ = write!(text, " <{name}>");
            }
        }
        let (samples, period) = left
            .remove(&address.wrapping_sub(function.start))
            .unwrap_or_default();
        lines.push(AnnotatedLine {
            address,
            samples,
            period,
            text,
        });
    }
    // Drops the padding between this function and the next one.
    while lines.last().is_some_and(is_padding) {
        lines.pop();
    }
    AnnotatedCode {
        lines,
        misaligned: left.values().map(|(samples, _)| samples).sum(),
    }
}

/// Returns whether the line may be padding: a NOP without samples.
fn is_padding(line: &AnnotatedLine) -> bool {
    let fills = ["nop", "int3", "xchg %ax,%ax", "data16", "cs nop"];
    line.samples == 0 && fills.iter().any(|fill| line.text.starts_with(fill))
}

/// Formats an annotated function as text. `source` names the source of its code, such as a file.
pub fn render(event: &str, function: &SampledFunction, annotated: &AnnotatedCode, source: &str) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "# {} of {}", function.name, function.object);
    let _ = writeln!(out, "# Samples: {} of event '{event}'", function.samples());
    let _ = writeln!(out, "# Code: {source}");
    let _ = writeln!(out, "#");
    let _ = writeln!(out, "# {:>7}  {:>8}  Address and instruction", "Share", "Samples");
    for line in &annotated.lines {
        let percent = 100.0 * line.period as f64 / function.period.max(1) as f64;
        let (share, samples) = match line.samples {
            0 => (String::new(), String::new()),
            n => (format!("{percent:.2}%"), n.to_string()),
        };
        let _ = writeln!(
            out,
            "{share:>9}  {samples:>8}  {:>16x}:  {}",
            line.address, line.text
        );
    }
    if annotated.misaligned > 0 {
        let _ = writeln!(
            out,
            "# {} samples are at no instruction of this code: what ran there was not quite this",
            annotated.misaligned
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::{EventSamplingRate, NO_PID, ProfileMetadata, ProfileSample, ProfileSymbol};
    use super::*;

    /// Code of the sampled test function: push %rbp; mov %rsp,%rbp; jmp to itself; ret.
    const CODE: [u8; 7] = [0x55, 0x48, 0x89, 0xe5, 0xeb, 0xfe, 0xc3];

    fn profile(ips: &[u64]) -> Profile {
        let event = SampledEventInfo {
            name: "cycles".into(),
            type_: 0,
            config: 0,
            rate: EventSamplingRate::Period(1),
            branch_filter: 0,
            has_chains: true,
            id: 7,
        };
        let mut profile = Profile::new(ProfileMetadata::default(), vec![event]);
        profile.symbols = vec![ProfileSymbol {
            start: 0x1000,
            end: 0x1007,
            name: "spin".into(),
            pid: None,
        }];
        for &ip in ips {
            push(&mut profile, ip, 0x5000);
        }
        profile
    }

    fn push(profile: &mut Profile, ip: u64, cr3: u64) {
        profile.push(&ProfileSample {
            pid: NO_PID,
            tid: NO_PID,
            ip,
            cr3,
            period: 10,
            event_id: 7,
            ..ProfileSample::default()
        });
    }

    fn only(profile: &Profile) -> SampledFunction {
        let mut symbols = Symbolizer::new(profile, None, None);
        let mut list = functions(profile, &mut symbols, &profile.events[0]);
        assert_eq!(list.len(), 1);
        list.remove(0)
    }

    /// Each sample is assigned to its instruction, and the shares in percent are relative to the
    /// function.
    #[test]
    fn annotate_assigns_samples_to_instructions() {
        let function = only(&profile(&[0x1004, 0x1004, 0x1004, 0x1001]));
        assert_eq!(
            (function.name.as_str(), function.cr3, function.end),
            ("spin", 0x5000, 0x1007)
        );
        let annotated = annotate(&function, &CODE, |target| Some(format!("at {target:#x}")));
        let text = render("cycles", &function, &annotated, "a test");
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].trim().starts_with("1000:  push"), "{text}");
        assert!(lines[1].contains("25.00%") && lines[1].contains("mov"), "{text}");
        assert!(
            lines[2].contains("75.00%") && lines[2].contains("<at 0x1004>"),
            "{text}"
        );
        assert_eq!(annotated.misaligned, 0);
        assert!(text.contains("# Code: a test"));
    }

    #[test]
    fn annotate_uses_cr3_of_first_sample_with_registers() {
        let mut profile = profile(&[]);
        for cr3 in [0, 0x5000, 0, 0x6000] {
            push(&mut profile, 0x1004, cr3);
        }
        assert_eq!(only(&profile).cr3, 0x5000);
    }

    /// Padding between two functions is hidden, but a sampled NOP is shown.
    #[test]
    fn annotate_hides_padding() {
        let padded = [&CODE[..], &[0x90, 0x66, 0x90, 0xcc]].concat();
        let lines = |ips: &[u64]| {
            let mut profile = profile(ips);
            profile.symbols[0].end = 0x100b;
            annotate(&only(&profile), &padded, |_| None).lines.len()
        };
        assert_eq!(lines(&[0x1004]), 4);
        assert_eq!(lines(&[0x1004, 0x1007]), 5);
    }

    /// Samples at addresses inside an instruction are reported, because they show that the code
    /// that ran was different.
    #[test]
    fn annotate_reports_samples_inside_instructions() {
        let function = only(&profile(&[0x1002, 0x1004]));
        let annotated = annotate(&function, &CODE, |_| None);
        assert_eq!(annotated.misaligned, 1);
        assert!(render("cycles", &function, &annotated, "x").contains("1 samples are at no instruction"));
    }

    /// Disassembly of arbitrary bytes terminates, and the size of a function is bounded.
    #[test]
    fn annotate_terminates_on_arbitrary_code() {
        let mut function = only(&profile(&[0x1000]));
        function.end = u64::MAX;
        assert_eq!(function.length(), MAX_CODE);
        for byte in 0..=255u8 {
            let annotated = annotate(&function, &[byte; 64], |_| None);
            assert!(annotated.lines.len() <= 64);
        }
    }
}
