//! Agent inside the lab host, which starts processes and transfers files for the test runner.
//!
//! Usage: `lab-agent PORT`, where PORT is the character device of a virtio serial port. The agent
//! exits when the runner closes the connection, and the lab's init then powers the machine off.
//!
//! `lab-agent heartbeat` does not serve a runner. It sends periodic interrupts to the lab's
//! processors until it is killed.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use perf_event_open_sys::bindings::{PERF_TYPE_SOFTWARE, perf_event_attr};
use perf_event_open_sys::perf_event_open;

use lab_agent::cpu_time::{WATCH_PERIOD, cpu_ticks_of_group};
use lab_agent::heartbeat;
use lab_agent::ordered::{self, OrderedOutputReceiver, OutputStream};
use lab_agent::terminal;
use lab_agent::wire::{
    Frame, FrameKind, MAX_PAYLOAD_BYTES, NewFile, ProcessExit, ProcessStartRequest, StdioMode,
};
use lab_agent::wire::{read_frame, write_frame};

/// Connection to the test runner, shared by all threads of the agent.
#[derive(Clone)]
struct Runner(Arc<Mutex<File>>);

impl Runner {
    fn send(&self, kind: FrameKind, id: u32, payload: &[u8]) -> io::Result<()> {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut *port, kind, id, payload)
    }

    fn send_json(&self, kind: FrameKind, id: u32, value: &impl serde::Serialize) -> io::Result<()> {
        self.send(kind, id, &serde_json::to_vec(value)?)
    }

    fn send_failure(&self, id: u32, what: &str, error: &io::Error) -> io::Result<()> {
        self.send(FrameKind::Failed, id, format!("{what}: {error}").as_bytes())
    }
}

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: lab-agent PORT | heartbeat");
        return ExitCode::from(2);
    };
    let result = match path.as_str() {
        "heartbeat" => heartbeat::beat(),
        port => serve(port),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-agent: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(path: &str) -> io::Result<()> {
    let mut input = OpenOptions::new().read(true).write(true).open(path)?;
    // A port can be opened only once, so the file is duplicated.
    let runner = Runner(Arc::new(Mutex::new(input.try_clone()?)));
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let _in_use = InUse::keep();
    runner.send(FrameKind::Hello, 0, release.trim().as_bytes())?;
    let mut processes = HashMap::new();
    let mut files = HashMap::new();
    while let Some(frame) = read_frame(&mut input)? {
        handle(frame, &runner, &mut processes, &mut files)?;
    }
    Ok(())
}

/// Numbers of the software events that VMs and perf use (`perf_sw_ids`): clocks, page faults,
/// context switches and migrations.
const SOFTWARE_EVENTS: std::ops::RangeInclusive<u64> = 0..=6;

/// VMs and perf events that the agent keeps open as long as the lab runs, so that the kernel does
/// not patch its own code.
///
/// The Linux kernel patches its code, including the scheduler, when the first of these objects is
/// created or the last one is destroyed: a VM, a vCPU without an in-kernel local APIC, a vCPU with
/// a disabled one, and a perf event. QEMU before 8.1 may then discard all of its translations
/// (docs/guide/lab.md).
struct InUse {
    /// VMs whose vCPUs never run.
    _vms: Vec<(VmFd, VcpuFd)>,
    _events: Vec<OwnedFd>,
}

impl InUse {
    /// Creates the VMs and events. Ignores errors, because the lab usually works without them.
    fn keep() -> Self {
        let _events = SOFTWARE_EVENTS
            .filter_map(|config| software_event(config).ok())
            .collect();
        let vms = [vm_without_apic(), vm_with_apic_off()].into_iter();
        // If the kernel lacks KVM, the tests report this.
        let _vms = vms.filter_map(Result::ok).collect();
        Self { _vms, _events }
    }
}

/// Opens a software perf event that counts the calling thread.
#[expect(unsafe_code, reason = "calls of the system")]
fn software_event(config: u64) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config,
        ..Default::default()
    };
    // SAFETY: `attr` is initialized, has its own size, and lives until the call has returned.
    let fd = unsafe { perf_event_open(&raw mut attr, 0, -1, -1, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has returned this descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Creates a VM with a vCPU that has no in-kernel local APIC (`kvm_has_noapic_vcpu`).
fn vm_without_apic() -> Result<(VmFd, VcpuFd), kvm_ioctls::Error> {
    let vm = Kvm::new()?.create_vm()?;
    let vcpu = vm.create_vcpu(0)?;
    Ok((vm, vcpu))
}

/// Creates a vCPU whose local APIC is disabled both by its spurious-vector register, as after a
/// reset (`apic_sw_disabled`), and by IA32_APIC_BASE (`apic_hw_disabled`; SDM volume 3A, "Enabling
/// or Disabling the Local APIC").
fn vm_with_apic_off() -> Result<(VmFd, VcpuFd), kvm_ioctls::Error> {
    const APIC_GLOBAL_ENABLE: u64 = 1 << 11;
    let vm = Kvm::new()?.create_vm()?;
    vm.create_irq_chip()?;
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    sregs.apic_base &= !APIC_GLOBAL_ENABLE;
    vcpu.set_sregs(&sregs)?;
    Ok((vm, vcpu))
}

/// A running process and its input.
struct Running {
    pid: i32,
    stdin: Option<Input>,
}

impl Running {
    /// Sets the size of the process's terminal, if it has one, to the serialized size `size`.
    fn resize_terminal(&self, size: &[u8]) -> io::Result<()> {
        if let Some(Input::Terminal(terminal)) = &self.stdin {
            terminal::set_window_size(terminal, serde_json::from_slice(size)?);
        }
        Ok(())
    }

    /// Writes `bytes` to the input of the process. No bytes close the input.
    fn write_stdin(&mut self, bytes: &[u8]) {
        let gone = match &mut self.stdin {
            Some(stdin) if !bytes.is_empty() => stdin.write(bytes).is_err(),
            _ => true,
        };
        // A process that has exited can no longer read.
        if gone && let Some(stdin) = self.stdin.take() {
            stdin.close();
        }
    }
}

/// Destination of the data that the runner sends to the standard input of a process.
enum Input {
    Pipe(ChildStdin),
    Terminal(File),
}

impl Input {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => pipe.write_all(bytes),
            Self::Terminal(terminal) => terminal.write_all(bytes),
        }
    }

    /// Closes the input. On a terminal, sends Ctrl-D, which the terminal treats as end of file at
    /// the start of a line.
    fn close(self) {
        const END_OF_TRANSMISSION: &[u8] = &[4];
        if let Self::Terminal(mut terminal) = self {
            let _ = terminal.write_all(END_OF_TRANSMISSION);
        }
    }
}

/// Source from which the agent reads the output of a process.
enum OutputSource {
    Pipes(ChildStdout, ChildStderr),
    Ordered(OrderedOutputReceiver),
    Terminal(File),
}

/// Handles a frame from the tests.
fn handle(
    frame: Frame,
    runner: &Runner,
    processes: &mut HashMap<u32, Running>,
    files: &mut HashMap<u32, File>,
) -> io::Result<()> {
    let Frame { kind, id, payload } = frame;
    match kind {
        FrameKind::Start => {
            let start: ProcessStartRequest = serde_json::from_slice(&payload)?;
            let started = start_process(&start, id, runner);
            insert_or_report(processes, started, id, &start.argv.join(" "), runner)?;
        }
        FrameKind::Stdin => {
            if let Some(process) = processes.get_mut(&id) {
                process.write_stdin(&payload);
            }
        }
        FrameKind::Signal => {
            if let (Some(process), Ok(number)) = (processes.get(&id), payload.try_into()) {
                signal(process.pid, i32::from_le_bytes(number));
            }
        }
        FrameKind::Resize => {
            if let Some(process) = processes.get(&id) {
                process.resize_terminal(&payload)?;
            }
        }
        FrameKind::Create => {
            let new: NewFile = serde_json::from_slice(&payload)?;
            insert_or_report(files, create(&new), id, &new.path, runner)?;
        }
        FrameKind::Data => {
            if let Some(file) = files.get_mut(&id)
                && let Err(error) = file.write_all(&payload)
            {
                files.remove(&id);
                runner.send_failure(id, "write", &error)?;
            }
        }
        FrameKind::Done => {
            // The entry is absent if creating or writing the file failed, which has already been
            // reported.
            if files.remove(&id).is_some() {
                runner.send(FrameKind::Done, id, &[])?;
            }
        }
        FrameKind::Fetch => {
            let path = String::from_utf8_lossy(&payload).into_owned();
            let runner = runner.clone();
            thread::spawn(move || fetch(&path, id, &runner));
        }
        FrameKind::Hello
        | FrameKind::Stdout
        | FrameKind::Stderr
        | FrameKind::Exit
        | FrameKind::Failed
        | FrameKind::Used => {
            return Err(unexpected_frame(kind));
        }
    }
    Ok(())
}

/// Inserts what a request has opened into `table`, or reports the failure to open `what`.
fn insert_or_report<T>(
    table: &mut HashMap<u32, T>,
    opened: io::Result<T>,
    id: u32,
    what: &str,
    runner: &Runner,
) -> io::Result<()> {
    match opened {
        Ok(opened) => {
            table.insert(id, opened);
            Ok(())
        }
        Err(error) => runner.send_failure(id, what, &error),
    }
}

/// Returns the error for a frame that only the agent may send.
fn unexpected_frame(kind: FrameKind) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{kind:?} is not for the agent"),
    )
}

/// Starts a process, whose output and end are sent to the tests.
fn start_process(start: &ProcessStartRequest, id: u32, runner: &Runner) -> io::Result<Running> {
    let (child, stdin, output) = spawn(start)?;
    let pid = i32::try_from(child.id()).unwrap_or(0);
    let runner = runner.clone();
    thread::spawn(move || watch(child, output, id, &runner));
    let stdin = Some(stdin);
    Ok(Running { pid, stdin })
}

/// Starts a process. Returns the process, its input and the source of its output.
fn spawn(start: &ProcessStartRequest) -> io::Result<(Child, Input, OutputSource)> {
    let (program, arguments) = start
        .argv
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program"))?;
    let mut command = Command::new(program);
    command.args(arguments).envs(start.env.iter().cloned());
    if let StdioMode::Terminal(size) = start.streams {
        // The terminal makes the process the leader of a session and of a process group.
        let terminal = terminal::attach(&mut command, size)?;
        let child = command.spawn()?;
        let output = OutputSource::Terminal(terminal.try_clone()?);
        return Ok((child, Input::Terminal(terminal), output));
    }
    // Use a separate process group, so that signals also reach the children.
    command.stdin(Stdio::piped()).process_group(0);
    let ordered = match start.streams {
        StdioMode::Ordered => {
            let (output, input) = ordered::pipes()?;
            command.stdout(input.stdout).stderr(input.stderr);
            Some(output)
        }
        _ => {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            None
        }
    };
    let mut child = command.spawn()?;
    let missing = || io::Error::from(io::ErrorKind::BrokenPipe);
    let stdin = child.stdin.take().ok_or_else(missing)?;
    let output = match ordered {
        Some(output) => OutputSource::Ordered(output),
        None => OutputSource::Pipes(
            child.stdout.take().ok_or_else(missing)?,
            child.stderr.take().ok_or_else(missing)?,
        ),
    };
    Ok((child, Input::Pipe(stdin), output))
}

/// Forwards the output of a process and then its exit status to the runner.
fn watch(mut child: Child, output: OutputSource, id: u32, runner: &Runner) {
    let (ended, watching) = mpsc::channel();
    let watch = {
        let (runner, group) = (runner.clone(), i32::try_from(child.id()).unwrap_or(0));
        thread::spawn(move || report_cpu_time(group, id, &runner, &watching))
    };
    match output {
        OutputSource::Pipes(stdout, stderr) => {
            let errors = {
                let runner = runner.clone();
                thread::spawn(move || forward(stderr, FrameKind::Stderr, id, &runner))
            };
            forward(stdout, FrameKind::Stdout, id, runner);
            let _ = errors.join();
        }
        OutputSource::Ordered(mut output) => {
            // Forwarding fails when the runner has hung up.
            let _ = output.forward(|stream, bytes| match stream {
                OutputStream::Stdout => runner.send(FrameKind::Stdout, id, bytes),
                OutputStream::Stderr => runner.send(FrameKind::Stderr, id, bytes),
            });
        }
        OutputSource::Terminal(terminal) => forward(terminal, FrameKind::Stdout, id, runner),
    }
    drop(ended);
    let _ = watch.join();
    let ended = match child.wait() {
        Ok(status) => ProcessExit {
            code: status.code(),
            signal: status.signal(),
        },
        Err(_) => ProcessExit {
            code: None,
            signal: None,
        },
    };
    // The runner may have hung up, in which case the main loop terminates the agent.
    let _ = runner.send_json(FrameKind::Exit, id, &ended);
}

/// Periodically reports the CPU time of a process group until the sender of `ended` is dropped.
fn report_cpu_time(group: i32, id: u32, runner: &Runner, ended: &mpsc::Receiver<()>) {
    while ended.recv_timeout(WATCH_PERIOD) == Err(mpsc::RecvTimeoutError::Timeout) {
        let ticks = cpu_ticks_of_group(group);
        if runner.send(FrameKind::Used, id, &ticks.to_le_bytes()).is_err() {
            return;
        }
    }
}

fn forward(mut pipe: impl Read, kind: FrameKind, id: u32, runner: &Runner) {
    let mut buffer = vec![0; MAX_PAYLOAD_BYTES];
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => {
                if runner.send(kind, id, &buffer[..length]).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

fn create(new: &NewFile) -> io::Result<File> {
    if let Some(parent) = Path::new(&new.path).parent() {
        fs::create_dir_all(parent)?;
    }
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(new.mode)
        .open(&new.path)?;
    file.set_permissions(fs::Permissions::from_mode(new.mode))?;
    Ok(file)
}

fn fetch(path: &str, id: u32, runner: &Runner) {
    let result = (|| {
        // Opening a FIFO would wait for a writer, and reading a device may never end.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut file = File::open(path)?;
        let mut buffer = vec![0; MAX_PAYLOAD_BYTES];
        loop {
            let length = file.read(&mut buffer)?;
            if length == 0 {
                return runner.send(FrameKind::Done, id, &[]);
            }
            runner.send(FrameKind::Data, id, &buffer[..length])?;
        }
    })();
    if let Err(error) = result {
        let _ = runner.send_failure(id, path, &error);
    }
}

/// Sends a signal to a process group.
#[expect(unsafe_code, reason = "calls of the system")]
fn signal(pid: i32, number: i32) {
    if pid > 0 {
        // SAFETY: kill(2) takes two integers and touches no memory of ours.
        unsafe { libc::kill(-pid, number) };
    }
}
