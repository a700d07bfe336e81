//! Tests `perfvisor exec` and `perfvisor cp` with the agent in a Linux guest over its vsock device:
//! execution, copying, and exit statuses. Clients that are killed, and floods of data, do not
//! affect other clients.
//!
//! All tests use one guest.

use integration::artefacts;
use integration::guest::LinuxGuest;
use integration::limit::ProcessTimeLimits;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Guest script that waits until the test creates a file in the guest.
const SCRIPT: &str = "
ls -l /dev/vsock
until [ -e /tmp/end ]; do sleep 0.2; done
section agents sh -c 'pidof perfvisor-agent | wc -w'
";

struct VsockTest<'a> {
    place: &'a TestHost,
    perfvisor: String,
}

impl VsockTest<'_> {
    fn command(&self, words: &[&str]) -> HostCommand {
        HostCommand::new(&self.perfvisor).args(words.iter().copied())
    }

    fn run(&self, words: &[&str]) -> ProcessOutput {
        self.place.run(&self.command(words), LIMIT).unwrap()
    }

    fn exec(&self, command: &[&str]) -> ProcessOutput {
        self.run(&[&["exec", "--wait", "60", "vsock-test", "--"], command].concat())
    }

    /// Runs a command in the guest with `perfvisor exec` and returns its output. Panics if the
    /// command fails.
    #[track_caller]
    fn output_of(&self, command: &[&str]) -> String {
        let output = self.exec(command);
        assert!(
            output.success(),
            "{command:?}: {:?} {}",
            output.ended,
            output.stderr_text()
        );
        output.stdout_text()
    }

    /// Checks that the `perfvisor` command `words` fails with exit status `status` and prints a
    /// single line that contains `why`.
    #[track_caller]
    fn refused(&self, words: &[&str], status: i32, why: &str) {
        let output = self.run(words);
        let text = output.stderr_text();
        assert_eq!(
            (output.code(), text.lines().count()),
            (Some(status), 1),
            "{words:?}: {text}"
        );
        assert!(text.contains(why), "{words:?}: {text}");
    }

    fn shell(&self, script: &str) -> ProcessOutput {
        self.place
            .run(&HostCommand::shell(script.to_owned()), LIMIT)
            .unwrap()
    }
}

#[test]
fn vsock_agent_runs_commands_and_copies_files() {
    let place = match TestHost::shared() {
        Ok(place) => place,
        Err(why) => panic!("{why}"),
    };
    let agent = &artefacts::binaries().unwrap().guest_agent;
    let linux = LinuxGuest::new("vsock", "amd")
        .memory_mib(768)
        .file("bin/perfvisor-agent", 0o755, std::fs::read(agent).unwrap())
        .args(["--name", "vsock-test", "--vsock"])
        .script(SCRIPT);
    let running = place.start(&linux.command(&place).unwrap()).unwrap();
    assert!(running.wait_for("@@pv boot", LIMIT));
    let guest = VsockTest {
        perfvisor: place.perfvisor().unwrap(),
        place: &place,
    };

    streams_and_ends(&guest);
    missing_paths(&guest);
    copies(&guest);
    many_at_once(&guest);
    a_client_that_dies(&guest);
    a_flood(&guest);

    guest.output_of(&["touch", "/tmp/end"]);
    let output = running.wait(LIMIT).unwrap();
    let run = linux.finish(&output).unwrap();
    assert_eq!(run.section("agents").trim(), "1");
    run.expect_success();
    guest.refused(
        &["exec", "vsock-test", "--", "true"],
        2,
        "no VM named 'vsock-test'",
    );
    assert!(!guest.shell("ls $XDG_RUNTIME_DIR/perfvisor/*.vsock").success());
}

fn streams_and_ends(guest: &VsockTest<'_>) {
    assert_eq!(guest.output_of(&["uname", "-s"]), "Linux\n");
    let output = guest.exec(&["sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(
        (
            output.code(),
            output.stdout_text().as_str(),
            output.stderr_text().as_str()
        ),
        (Some(7), "out\n", "err\n")
    );
    assert_eq!(guest.exec(&["sh", "-c", "kill -9 $$"]).code(), Some(137));
    let words = [
        "exec",
        "-e",
        "A=b c",
        "-C",
        "/tmp",
        "vsock-test",
        "--",
        "sh",
        "-c",
        "echo $A; pwd",
    ];
    assert_eq!(guest.run(&words).stdout_text(), "b c\n/tmp\n");
    let terminal = guest.run(&[
        "exec",
        "-t",
        "vsock-test",
        "--",
        "sh",
        "-c",
        "test -t 0 && stty size",
    ]);
    assert_eq!(
        (terminal.code(), terminal.stdout_text().trim()),
        (Some(0), "24 80")
    );
    // Use a realistic workload: the guest's own perf with its vPMU.
    let perf = guest.exec(&["perf", "stat", "-x,", "-e", "cycles", "spin", "0.1"]);
    let count = perf.stderr_text();
    let cycles = count.split(',').next().and_then(|n| n.trim().parse::<u64>().ok());
    assert!(perf.success() && cycles.is_some_and(|n| n > 1_000_000), "{count}");
}

fn missing_paths(guest: &VsockTest<'_>) {
    guest.refused(&["exec", "vsock-test", "--", "/no/such"], 2, "command not found");
    guest.refused(
        &["exec", "-C", "/no", "vsock-test", "--", "true"],
        2,
        "directory not found",
    );
    guest.refused(&["exec", "nobody", "--", "true"], 2, "no VM named 'nobody'");
    guest.refused(&["cp", "vsock-test:/no/such", "/tmp/x"], 2, "No such file");
    guest.refused(&["cp", "/no/such", "vsock-test:/tmp"], 2, "/no/such");
    guest.refused(&["cp", "/etc", "/tmp"], 2, "NAME:PATH");
    guest.refused(&["cp", "/guest/initrd", "vsock-test:/proc/x"], 2, "/proc/x");
}

fn copies(guest: &VsockTest<'_>) {
    // Transfer 16 MiB of poorly compressible data in both directions, and through pipes.
    let script = "set -e; cd /tmp; head -c 16777216 /dev/urandom >big; chmod 640 big
        PV cp big vsock-test:/tmp/big; PV cp vsock-test:/tmp/big back
        cmp big back; [ \"$(stat -c %a%Y big)\" = \"$(stat -c %a%Y back)\" ]
        sum=$(sha256sum <big); [ \"$(PV exec vsock-test -- sha256sum /tmp/big | cut -c1-64)\" = \"${sum%% *}\" ]
        PV exec vsock-test -- cat <big | cmp big -
        PV cp - vsock-test:/tmp/piped <big; PV cp vsock-test:/tmp/piped - | cmp big -
        PV exec vsock-test -- rm /tmp/big /tmp/piped; rm big back
        mkdir -p tree/d/e; echo x >tree/d/f; ln -s d/f tree/link
        PV cp tree vsock-test:/tmp; PV cp vsock-test:/tmp/tree tree2
        [ \"$(readlink tree2/link)\" = d/f ]; cmp tree/d/f tree2/d/f; [ -d tree2/d/e ]; rm -r tree tree2";
    let output = guest.shell(&script.replace("PV", &guest.perfvisor));
    assert!(output.success(), "{:?}: {}", output.ended, output.stderr_text());
}

fn many_at_once(guest: &VsockTest<'_>) {
    let script = "for n in 1 2 3 4 5 6 7 8; do (PV exec vsock-test -- sh -c \"sleep 0.2; echo $n; exit $n\"
        [ $? = $n ] && echo right) & done; wait";
    let output = guest.shell(&script.replace("PV", &guest.perfvisor));
    let text = output.stdout_text();
    assert_eq!(text.lines().filter(|line| *line == "right").count(), 8, "{text}");
}

fn a_client_that_dies(guest: &VsockTest<'_>) {
    let words = ["exec", "vsock-test", "--", "sh", "-c", "echo begun; sleep 86399"];
    let mut client = guest.place.start(&guest.command(&words)).unwrap();
    assert!(client.wait_for("begun", LIMIT));
    client.signal(9);
    let _ = client.wait(LIMIT);
    no_command_is_left(guest);
    // Ctrl-C typed at a client is forwarded to the command.
    let mut client = guest.place.start(&guest.command(&words)).unwrap();
    assert!(client.wait_for("begun", LIMIT));
    client.signal(2);
    assert_eq!(client.wait(LIMIT).unwrap().code(), Some(130));
    no_command_is_left(guest);
}

/// Waits until the guest has terminated the commands of a disconnected client.
#[track_caller]
fn no_command_is_left(guest: &VsockTest<'_>) {
    // The brackets prevent the search from matching itself.
    guest.output_of(&[
        "sh",
        "-c",
        "while ps | grep -q 'slee[p] 86399'; do sleep 0.1; done",
    ]);
}

fn a_flood(guest: &VsockTest<'_>) {
    // Cover a guest that writes endlessly to a client that does not read, and a client that exits
    // early.
    let script = "PV exec vsock-test -- cat /dev/zero | sleep 3; PV exec vsock-test -- cat /dev/zero | head -c 1000000 | wc -c";
    let output = guest.shell(&script.replace("PV", &guest.perfvisor));
    assert_eq!(output.stdout_text().trim(), "1000000");
    assert_eq!(guest.output_of(&["echo", "alive"]), "alive\n");
}
