//! Tests with scripted Linux guests. The scripts provide the values from perf, the guest kernel,
//! the host and the operator.

use std::path::PathBuf;

use control_api::protocol::Call;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::child::tests::{never_stop, refusal, scripted, views};
use crate::guest::tests::{opened, reading};
use crate::host::tests::options;
use crate::report::ValidationRow;

/// Values that the simulated guest, host and operator report.
#[derive(Clone, Debug, Default)]
pub(super) struct ScriptedValues {
    /// Output of each command, by `case` pattern of the shell.
    pub prints: Vec<(&'static str, String)>,
    /// CPU time of the program in nanoseconds, according to the guest kernel.
    pub cpu_ns: u64,
    /// Increase of the only counter in use of each vCPU between the start and the end of a program,
    /// as seen by the host.
    pub moved: Vec<u64>,
    /// Number of overflows of each counter during a program, or `None` if the host does not report
    /// them.
    pub overflows: Option<u64>,
    /// Count of the operator's event on each vCPU, or `None` if the VM refuses it.
    pub operator: Option<Vec<u64>>,
}

impl ScriptedValues {
    /// Adds `text` as the output of the commands that match the shell pattern `pattern`.
    pub fn prints(mut self, pattern: &'static str, text: impl Into<String>) -> Self {
        self.prints.push((pattern, text.into()));
        self
    }

    fn script(&self) -> String {
        let arm = |(pattern, text): &(&str, String)| format!("{pattern}) printf '%s' '{text}';;\n");
        let arms: String = self.prints.iter().map(arm).collect();
        format!(
            "while read -r name command; do
               [ \"$name\" = end ] && exit 0
               echo \"@@pv begin $name\"
               case \"$command\" in *gate*)
                 echo '@@pv gate begin'; read -r go
                 echo '@@pv gate end wall_ns=1 cpu_ns={}'; read -r go;;
               esac
               case \"$command\" in
                 {arms}
               esac
               echo \"@@pv end $name 0\"
             done",
            self.cpu_ns
        )
    }

    /// Starts a Linux guest that is simulated by a script with the values of `self`.
    pub fn guest(&self) -> LinuxGuest {
        let Self {
            moved,
            operator,
            overflows,
            ..
        } = self.clone();
        let mut looks = 0;
        let vm = scripted(&self.script()).answered(move |call| {
            Ok(match call {
                Call::GuestView => json!({ "generation": 1 }),
                Call::GuestViewResult { .. } => {
                    looks += 1;
                    let over = looks % 2 == 0;
                    let at = |moved: &u64| vec![LINUX_START + if over { *moved } else { 0 }];
                    let mut seen = views(&moved.iter().map(at).collect::<Vec<_>>());
                    for vcpu in seen["vcpus"].as_array_mut().unwrap() {
                        vcpu["counters"][0]["overflows"] = json!(overflows.map(|n| if over { n } else { 0 }));
                    }
                    seen
                }
                Call::Open { .. } => {
                    let Some(counts) = &operator else {
                        return Err(refusal("strict"));
                    };
                    let events = (0..)
                        .zip(counts)
                        .map(|(vcpu, _)| opened(Some(10 + vcpu), 0, vcpu));
                    serde_json::to_value(events.collect::<Vec<_>>()).unwrap()
                }
                Call::Read => {
                    let counts = (10..).zip(operator.iter().flatten());
                    serde_json::to_value(counts.map(|(handle, n)| reading(handle, *n)).collect::<Vec<_>>())
                        .unwrap()
                }
                _ => Value::Null,
            })
        });
        LinuxGuest { vm }
    }

    /// Returns the rows that `measure` adds for the scripted guest on `host`.
    pub fn rows(
        &self,
        host: &HostProperties,
        measure: impl FnOnce(
            &Linux<'_>,
            &mut LinuxGuest,
            &mut ValidationRowCollector<'_>,
        ) -> Result<(), VmMeasurementError>,
    ) -> Vec<ValidationRow> {
        self.seen(host, |linux, guest| {
            let mut on_row = |_: &ValidationRow| ();
            let mut rows = ValidationRowCollector::new(&mut on_row);
            measure(linux, guest, &mut rows)?;
            Ok(rows.into_vec())
        })
    }

    /// Returns the result of `measure` for the scripted guest on `host`.
    pub fn seen<T>(
        &self,
        host: &HostProperties,
        look: impl FnOnce(&Linux<'_>, &mut LinuxGuest) -> Result<T, VmMeasurementError>,
    ) -> T {
        let (options, signals) = (options(), never_stop());
        let files = LinuxFiles {
            kernel: PathBuf::new(),
            initrd: PathBuf::new(),
        };
        let linux = Linux {
            options: &options,
            host,
            signals: &signals,
            files: &files,
        };
        let mut guest = self.guest();
        let made = look(&linux, &mut guest).unwrap();
        guest.end().unwrap();
        made
    }
}

/// Returns a line of `perf stat -x,` for an event with a running share of 100 %.
pub(super) fn perf_line(event: &str, value: u64) -> String {
    format!("{value},,{event},1000,100.00,,\n")
}

/// Runs one command in a simulated guest whose shell executes `script`, and returns the result.
fn run_script(script: &str) -> Result<CommandResult, VmMeasurementError> {
    let vm = scripted(&format!("read -r line; {script}; read -r line"));
    LinuxGuest { vm }.run("x", "command", None)
}

/// A command's output lies between its two markers and ends with its status.
#[test]
fn command_output_is_between_markers() {
    let done =
        run_script("echo noise; echo '[ 1.0] @@pv begin x'; echo one; printf 'two@@pv end x 3\\n'").unwrap();
    assert_eq!((done.text.as_str(), done.status), ("one\ntwo", 3));
    assert!(done.gate.is_none());
    let done = run_script("echo '@@pv begin x'; echo '@@pv end other 0'; echo '@@pv end x what'").unwrap();
    assert_eq!(
        (done.text.as_str(), done.status),
        ("@@pv end other 0\n", -1),
        "no status is no success"
    );
}

/// Only a limited amount of a command's output is kept.
#[test]
fn command_output_is_bounded() {
    let lines = MAX_OUTPUT_LINES + 500;
    let done = run_script(&format!("echo '@@pv begin x'; seq {lines}; echo '@@pv end x 0'")).unwrap();
    assert_eq!(done.text.lines().count(), MAX_OUTPUT_LINES);
    assert_eq!(
        (done.text.lines().next(), done.status),
        (Some("1"), 0),
        "the first, and the end is seen"
    );
}

/// A guest that reports the end of a program before its start causes an error.
#[test]
fn gate_end_before_begin_is_error() {
    let error = run_script("echo '@@pv begin x'; echo '@@pv gate end cpu_ns=5'").unwrap_err();
    assert!(
        matches!(error, VmMeasurementError::Answer(ref line) if line.contains("gate end")),
        "{error}"
    );
}

/// The counters of guest and host are read at the start and end of a program that `gate` stops
/// there. The operator's events are enabled between these points.
#[test]
fn gate_reads_guest_and_host_counters() {
    let told = ScriptedValues {
        cpu_ns: 17,
        moved: vec![70],
        operator: Some(vec![71]),
        ..ScriptedValues::default()
    };
    let mut guest = told.prints("*", "5,,cycles,10,50.00,,\n").guest();
    let operator = OperatorEventConfig::counting("cycles");
    let done = guest.run("count", "gate spin", Some(operator)).unwrap();
    let gate = done.gate.unwrap();
    assert_eq!((gate.cpu_ns, gate.host(0)), (17, Some(70)));
    let saw = gate.operator.unwrap();
    assert_eq!(saw.reading(0, 0).and_then(|reading| reading.estimate), Some(71));
    assert_eq!(counts(&done.text)[0].value, Some(5));
    guest.end().unwrap();
}

#[test]
fn fields_of_perf_stat_are_read() {
    let text = "CPU1,2900,,cycles,1000,100.00,2.9,GHz\n\
                1500.25,msec,task-clock,1500250000,100.00,0.9,CPUs utilized\n\
                <not supported>,,instructions,0,100.00,,\nspin: iterations=5\n";
    let counts = counts(text);
    assert_eq!(counts.len(), 3);
    assert_eq!((counts[0].cpu, counts[0].value), (Some(1), Some(2900)));
    assert_eq!(counts[1].value, Some(1_500_250_000));
    assert_eq!(
        (counts[2].value, counts[2].event.as_str()),
        (None, "instructions")
    );
}

/// Returns the readings of a program with the counter values `before` at its start and `after` at
/// its end.
fn gate(before: &[u64], after: &[u64]) -> Gate {
    let views = |values: &[u64]| {
        let counter = |(n, value): (usize, &u64)| control_api::protocol::GuestCounter {
            counter: format!("gp{n}"),
            value: *value,
            ..Default::default()
        };
        vec![VcpuView {
            counters: values.iter().enumerate().map(counter).collect(),
            ..VcpuView::default()
        }]
    };
    Gate {
        cpu_ns: 0,
        before: views(before),
        after: views(after),
        facts: Vec::new(),
        operator: None,
    }
}

/// The host's count is taken from the only counter that changed, relative to Linux's initial value.
/// If two counters have changed, there is no count.
#[test]
fn host_count_is_of_single_moved_counter() {
    let moved = gate(&[5, LINUX_START], &[5, LINUX_START + 70]);
    assert_eq!(moved.host(0), Some(70));
    assert_eq!(moved.host_exactly(0).unwrap().value, 70);
    assert_eq!(gate(&[5, 6], &[5, 6]).host(0), None, "none moved");
    let two = gate(&[LINUX_START; 2], &[LINUX_START + 1, LINUX_START + 2]);
    assert_eq!(two.host(0), None);
    assert_eq!(gate(&[0], &[3]).host(0), None, "not armed by Linux");
    assert_eq!(moved.host(1), None, "no such vCPU");
}

#[test]
fn words_of_the_gate_are_read() {
    assert_eq!(field("wall_ns=9 cpu_ns=17", "cpu_ns="), Some(17));
    assert_eq!(field("cpu_ns=x", "cpu_ns="), None);
    assert_eq!(field("", "cpu_ns="), None);
}

/// Impossible counter values, truncated lines and output of other programs are ignored.
#[test]
fn invalid_count_lines_are_ignored() {
    for line in [
        "",
        ",",
        "CPU,5,,cycles,10,100.00",
        "CPU-1,5,,cycles,10,100.00",
        "5,,cycles,10",
        "five,,cycles,10,100.00",
        "5,,cycles,10,all",
    ] {
        assert_eq!(count(line), None, "{line}");
    }
    assert_eq!(
        count("-5,,cycles,10,100.00").unwrap().value,
        Some(0),
        "no count is below 0"
    );
    assert_eq!(count("1e300,,cycles,10,100.00").unwrap().value, Some(u64::MAX));
    assert_eq!(count("<not counted>,,cycles,0,0.00").unwrap().value, None);
}

proptest! {
    #[test]
    fn parser_survives_random_guest_lines(line in ".{0,120}", commas in "[,0-9CPU.a-z<> ]{0,80}") {
        let _ = (count(&line), count(&commas), field(&line, "cpu_ns="));
    }
}
