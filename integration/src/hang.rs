//! Collects the state of a hung guest and of its lab before they are killed.
//!
//! If a guest on a remote machine hangs rarely, the output of the failed test is the only means of
//! diagnosis. If the lab itself hangs, its emulator is queried.

use std::fmt::Write as _;
use std::time::Duration;

use crate::lab::Lab;
use crate::process::{HostCommand, last_lines};

/// Time limit for running the command `true` in the lab. A lab that exceeds the limit is regarded
/// as unresponsive.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Number of snapshots of QEMU's instruction pointers, and the time between two snapshots.
const SNAPSHOTS: u32 = 5;
const BETWEEN_SNAPSHOTS: Duration = Duration::from_millis(300);

/// Time limit for the diagnostic commands inside the lab.
const LOOK_LIMIT: Duration = Duration::from_secs(300);

/// Shell commands that show the VMM's threads, the guest's PMU programming and the code that the
/// guest executes.
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

/// Diagnoses a lab in which a process has timed out, and returns a description. Takes up to six
/// minutes, or a few seconds on an idle machine.
pub(crate) fn look(lab: &Lab) -> String {
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
