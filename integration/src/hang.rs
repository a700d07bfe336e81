//! What a guest that does not end was doing, and the lab under it, told before it is killed.
//!
//! A guest that hangs once in many runs, on a machine that nobody can look at, is understood only by what the
//! failed test prints. The lab itself may be what hangs: then its emulator is asked.

use std::fmt::Write as _;
use std::time::Duration;

use crate::lab::Lab;
use crate::process::{Command, last_lines};

/// How long a lab may take to run `true`.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// How often the processors' registers are read, and how long after each other.
const SNAPSHOTS: u32 = 5;
const BETWEEN_SNAPSHOTS: Duration = Duration::from_millis(300);

/// How long the look into the lab may take.
const LOOK_LIMIT: Duration = Duration::from_secs(300);

/// What a person would type: are the VMM's threads running, what has the guest programmed, where does it run.
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

/// Looks at a lab in which something did not end in time. Takes up to six minutes, on a machine that is quiet
/// a few seconds.
pub(crate) fn look(lab: &Lab) -> String {
    let mut told = String::new();
    if lab.answers(ANSWER_LIMIT) {
        told.push_str("the lab answers; in it:\n");
        match lab.start(&Command::shell(LOOK)) {
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
