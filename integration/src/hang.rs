//! Collects diagnostics about a hung guest and its lab before they are killed.
//!
//! A rare hang on a remote machine can only be diagnosed from the output of the failed test. If the
//! lab itself hangs, its QEMU is queried.

use std::fmt::Write as _;
use std::time::Duration;

use crate::lab::Lab;
use crate::process::{HostCommand, last_lines};

/// Time limit of the command `true` in the lab. If the command takes longer, the lab is regarded as
/// unresponsive.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Number of times that QEMU's instruction pointers are sampled for a diagnosis.
const SNAPSHOTS: u32 = 5;
const BETWEEN_SNAPSHOTS: Duration = Duration::from_millis(300);

/// Time limit of the diagnostic commands in the lab.
const LOOK_LIMIT: Duration = Duration::from_secs(300);

/// Diagnostic shell commands. They print the state of the VMM's threads, the guest's PMU
/// configuration and the code that the guest executes.
const LOOK: &str = r#"
cat /proc/uptime /proc/loadavg
threads() {
	for p in $(pidof perfvisor); do
		for t in /proc/$p/task/*; do
			echo "$p $(cat $t/comm) $(awk '{print "state", $3, "user", $14, "system", $15, "cpu", $39}' $t/stat) $(cat $t/wchan)"
		done
	done
}
threads
sleep 2
echo 2 s later:
threads
timeout 60 perfvisor stat --guest-view
timeout 60 perfvisor stat -d 1 -e task-clock,kvm:exits,kvm:halt_exits,kvm:irq_injections,kvm:nmi_injections,kvm:io_exits
timeout 60 perfvisor record -q -d 2 -F 100 --chain-every 1 -o /tmp/hang.data && timeout 60 perfvisor report -i /tmp/hang.data | head -n 40
rm -f /tmp/hang.data
"#;

/// Describes the state of a lab in which a process has timed out. Takes a few seconds on an idle
/// machine, and at most six minutes.
pub(crate) fn diagnose(lab: &Lab) -> String {
    let mut told = String::new();
    if lab.answers(ANSWER_LIMIT) {
        told.push_str("the lab answers; in it:\n");
        match lab.start(&HostCommand::shell(LOOK)) {
            Ok(process) => match process.wait(LOOK_LIMIT) {
                Ok(output) => {
                    told.push_str(&last_lines(&(output.stdout_text() + &output.stderr_text()), 120))
                }
                Err(error) => _ = writeln!(told, "{error}"),
            },
            Err(error) => _ = writeln!(told, "{error}"),
        }
    } else {
        told.push_str("the lab does not answer\n");
    }
    match lab.instruction_pointers(SNAPSHOTS, BETWEEN_SNAPSHOTS) {
        Ok(processors) => {
            for (processor, seen) in processors {
                _ = writeln!(told, "QEMU's {processor}: {}", seen.join(" "));
            }
        }
        Err(error) => _ = writeln!(told, "QEMU's monitor: {error}"),
    }
    told
}
