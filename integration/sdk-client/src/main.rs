//! Life cycle of a VM controlled with a published Rust SDK for Firecracker: configure, start,
//! pause, resume, save, load, stop.
//!
//! `sdk-client FIRECRACKER KERNEL INITRD BOOT_ARGS DRIVE DRIVE TAP DIRECTORY`
//!
//! The guest prints `marker-up` and then lines that begin with `tick`, listens on vsock port
//! [`AGENT_PORT`], and powers off when its power button is pressed. The program prints one line for
//! each step.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use firecracker_rs_sdk::firecracker::FirecrackerOption;
use firecracker_rs_sdk::instance::Instance;
use firecracker_rs_sdk::models::*;

/// vsock port on which the guest's agent listens.
const AGENT_PORT: u32 = 20_566;
/// Interval between two checks of the console.
const INTERVAL: Duration = Duration::from_millis(100);
/// Time without console output after which the guest is regarded as paused.
const SILENCE: Duration = Duration::from_secs(3);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Arguments {
    firecracker: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
    boot_args: String,
    drives: [PathBuf; 2],
    tap: PathBuf,
    directory: PathBuf,
}

impl Arguments {
    fn parse() -> Option<Self> {
        let mut words = std::env::args().skip(1);
        Some(Self {
            firecracker: words.next()?.into(),
            kernel: words.next()?.into(),
            initrd: words.next()?.into(),
            boot_args: words.next()?,
            drives: [words.next()?.into(), words.next()?.into()],
            tap: words.next()?.into(),
            directory: words.next()?.into(),
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Starts a process that serves the Firecracker API for VM `id`.
    fn process(&self, id: &str) -> Result<Instance> {
        let mut instance = FirecrackerOption::new(&self.firecracker)
            .id(id)
            .api_sock(self.path(&format!("{id}.api")))
            .stdin("/dev/null")
            .stdout(self.path(&format!("{id}.console")))
            .stderr(self.path(&format!("{id}.log")))
            .build()?;
        instance.start_vmm()?;
        Ok(instance)
    }

    fn configure(&self, instance: &mut Instance) -> Result<()> {
        instance.put_machine_configuration(&MachineConfiguration {
            cpu_template: None,
            smt: None,
            mem_size_mib: 256,
            track_dirty_pages: None,
            vcpu_count: 1,
            huge_pages: None,
        })?;
        instance.put_guest_boot_source(&BootSource {
            boot_args: Some(self.boot_args.clone()),
            initrd_path: Some(self.initrd.clone()),
            kernel_image_path: self.kernel.clone(),
        })?;
        for (n, drive) in self.drives.iter().enumerate() {
            instance.put_guest_drive_by_id(&Drive {
                drive_id: format!("drive{n}"),
                partuuid: None,
                is_root_device: false,
                cache_type: None,
                is_read_only: n == 1,
                path_on_host: drive.clone(),
                rate_limiter: None,
                io_engine: None,
                socket: None,
            })?;
        }
        instance.put_guest_network_interface_by_id(&NetworkInterface {
            guest_mac: Some("02:00:00:00:00:2a".into()),
            host_dev_name: self.tap.clone(),
            iface_id: "eth0".into(),
            rx_rate_limiter: None,
            tx_rate_limiter: None,
        })?;
        instance.put_guest_vsock(&Vsock {
            guest_cid: 42,
            uds_path: self.path("vsock"),
            vsock_id: None,
        })?;
        instance.put_entropy_device(&EntropyDevice { rate_limiter: None })?;
        Ok(())
    }

    fn console(&self, id: &str) -> String {
        let bytes = fs::read(self.path(&format!("{id}.console"))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until `holds` returns `true` for the console output of VM `id`. There is no timeout;
    /// the caller of this program must limit the time.
    fn wait(&self, id: &str, holds: impl Fn(&str) -> bool) {
        while !holds(&self.console(id)) {
            sleep(INTERVAL);
        }
    }

    fn ticks(&self, id: &str) -> usize {
        self.console(id).matches("\ntick").count()
    }

    fn wait_for_ticks(&self, id: &str, more: usize) {
        let before = self.ticks(id);
        self.wait(id, |text| text.matches("\ntick").count() >= before + more);
    }

    /// Connects to the guest's agent through the VM's vsock socket.
    fn reach_agent(&self) -> Result<()> {
        let mut stream = UnixStream::connect(self.path("vsock"))?;
        writeln!(stream, "CONNECT {AGENT_PORT}")?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        if !line.starts_with("OK ") {
            return Err(format!("vsock: {line:?}").into());
        }
        Ok(())
    }
}

/// Checks the state of the VM. The state is compared as text, because the SDK does not export its
/// type.
fn expect_state(instance: &mut Instance, state: &str) -> Result<()> {
    let now = format!("{:?}", instance.describe_instance()?.state);
    if now != state {
        return Err(format!("the instance is {now}, not {state}").into());
    }
    Ok(())
}

fn wait_until_gone(path: &Path) {
    while path.exists() {
        sleep(INTERVAL);
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let mut first = arguments.process("sdk-1")?;
    println!(
        "version {:?}",
        first.get_firecracker_version()?.firecracker_version
    );
    arguments.configure(&mut first)?;
    println!("configured {}", first.get_machine_configuration()?.mem_size_mib);
    first.start()?;
    arguments.wait("sdk-1", |text| text.contains("marker-up"));
    expect_state(&mut first, "Running")?;
    arguments.reach_agent()?;
    println!("started");

    first.pause()?;
    expect_state(&mut first, "Paused")?;
    sleep(INTERVAL);
    let paused = arguments.console("sdk-1");
    sleep(SILENCE);
    if arguments.console("sdk-1") != paused {
        return Err("a paused guest has printed".into());
    }
    first.resume()?;
    arguments.wait_for_ticks("sdk-1", 2);
    println!("paused and resumed");

    first.pause()?;
    let (state, memory) = (arguments.path("state"), arguments.path("memory"));
    first.create_snapshot(&SnapshotCreateParams {
        mem_file_path: memory.clone(),
        snapshot_path: state.clone(),
        snapshot_type: Some(SnapshotType::Full),
        version: None,
    })?;
    println!("saved");
    drop(first);
    wait_until_gone(&arguments.path("vsock"));

    let mut second = arguments.process("sdk-2")?;
    second.load_snapshot(&SnapshotLoadParams {
        enable_diff_snapshots: None,
        mem_file_path: None,
        mem_backend: Some(MemoryBackend {
            backend_type: BackendType::File,
            backend_path: memory,
        }),
        resume_vm: Some(true),
        snapshot_path: state,
    })?;
    arguments.wait_for_ticks("sdk-2", 2);
    expect_state(&mut second, "Running")?;
    arguments.reach_agent()?;
    println!("loaded");

    second.stop()?;
    arguments.wait("sdk-2", |text| text.contains("@@pv done"));
    println!("stopped");
    Ok(())
}

fn main() {
    let Some(arguments) = Arguments::parse() else {
        eprintln!("usage: sdk-client FIRECRACKER KERNEL INITRD BOOT_ARGS DRIVE DRIVE TAP DIRECTORY");
        std::process::exit(2);
    };
    let ended = run(&arguments);
    for id in ["sdk-1", "sdk-2"] {
        println!("== {id}\n{}", arguments.console(id));
    }
    if let Err(error) = ended {
        for id in ["sdk-1", "sdk-2"] {
            let log = fs::read_to_string(arguments.path(&format!("{id}.log"))).unwrap_or_default();
            eprintln!("== {id}\n{log}");
        }
        eprintln!("sdk-client: {error}");
        std::process::exit(1);
    }
}
