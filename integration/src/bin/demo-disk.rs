//! `make demo-disk`: a Debian disk image boots to a login, its perf counts and samples, and the recording
//! comes out over vsock.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use integration::artefacts::target_dir;
use integration::lab::LabOptions;
use integration::limit::Limit;
use integration::place::Place;
use integration::process::{Command, Process};

const LIMIT: Limit = Limit::GENEROUS;
/// Of the VM.
const NAME: &str = "debian";
/// Where it finds its root file system, and that one vCPU's clock is the guest's.
const CMDLINE: &str = "root=/dev/vda rw console=ttyS0 tsc=reliable no_timer_check nokaslr";

fn main() -> ExitCode {
    match show() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo-disk: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The files that `make debian` has made, and the disk where the VM can have it.
struct Image {
    place: Place,
    kernel: String,
    initrd: String,
    disk: String,
}

fn image() -> Result<Image, Box<dyn Error>> {
    let built = |name: &str| -> Result<PathBuf, Box<dyn Error>> {
        let path = target_dir().join("debian").join(name);
        if path.is_file() {
            Ok(path)
        } else {
            Err(format!("{}: no such file; type: make debian", path.display()).into())
        }
    };
    let (kernel, initrd, disk) = (built("vmlinuz")?, built("initrd.img")?, built("disk.img")?);
    let options = LabOptions {
        perf: true,
        files: vec![
            ("guest/debian/vmlinuz".to_owned(), kernel.clone()),
            ("guest/debian/initrd.img".to_owned(), initrd.clone()),
        ],
        disk: Some(disk.clone()),
        ..LabOptions::default()
    };
    let place = Place::choose(&options)?;
    if let Place::Lab(_) = place {
        return Ok(Image {
            place,
            kernel: "/guest/debian/vmlinuz".to_owned(),
            initrd: "/guest/debian/initrd.img".to_owned(),
            disk: "/dev/vda".to_owned(),
        });
    }
    // The image stays as it is: a copy, which takes no space for what is empty.
    let copy = place.scratch("demo-disk.img");
    let command = Command::new("cp").args(["--sparse=always", &disk.to_string_lossy(), &copy]);
    let output = place.run(&command, LIMIT)?;
    if !output.success() {
        return Err(output.stderr_text().into());
    }
    Ok(Image {
        place,
        kernel: kernel.to_string_lossy().into_owned(),
        initrd: initrd.to_string_lossy().into_owned(),
        disk: copy,
    })
}

fn show() -> Result<(), Box<dyn Error>> {
    let image = image()?;
    let place = &image.place;
    println!("The guest runs {}.", place.describe());
    let perfvisor = place.perfvisor()?;
    let command = Command::new(&perfvisor)
        .args(["run", "--name", NAME, "--memory", "1G", "--vsock"])
        .args(["--kernel", &image.kernel, "--initrd", &image.initrd])
        .args(["--disk", &image.disk, "--cmdline", CMDLINE]);
    println!("$ {}", command.line());
    let started = Instant::now();
    let mut vm = place.start(&command)?;
    let wait = |vm: &Process, text: &str| -> Result<(), Box<dyn Error>> {
        if vm.wait_for(text, LIMIT) {
            return Ok(());
        }
        Err(format!(
            "the guest has not printed {text:?}; its console:\n{}",
            vm.stdout_so_far()
        )
        .into())
    };
    wait(&vm, "login:")?;
    println!("Login after {:.0} s.", started.elapsed().as_secs_f64());
    vm.write(b"root\n")?;
    wait(&vm, "root@perfvisor-debian")?;
    println!("Logged in as root.");

    let run = |words: &[&str]| -> Result<(), Box<dyn Error>> {
        let command = Command::new(&perfvisor).args(words.iter().copied());
        println!("$ {}", command.line());
        let output = place.run(&command, LIMIT)?;
        print!("{}{}", output.stdout_text(), output.stderr_text());
        if output.success() {
            Ok(())
        } else {
            Err(format!("{}: {:?}", command.line(), output.ended).into())
        }
    };
    let load = "stress-ng --cpu 1 --cpu-method matrixprod --timeout 3s";
    run(&[
        "exec",
        "--wait",
        "60",
        NAME,
        "--",
        "perf",
        "stat",
        "-e",
        "cycles,instructions,task-clock",
        "sh",
        "-c",
        load,
    ])?;
    let record = format!("perf record -q -F 500 -o /root/perf.data {load}");
    run(&["exec", NAME, "--", "sh", "-c", &record])?;
    let data = place.scratch("demo-disk.data");
    run(&["cp", &format!("{NAME}:/root/perf.data"), &data])?;
    // By the host's perf, of what the guest recorded.
    let report = Command::shell(format!(
        "perf report --stdio --sort comm,dso -i '{data}' 2>/dev/null | grep -v '^#' | grep . | head -n 12"
    ));
    println!("$ {}", report.line());
    let output = place.run(&report, LIMIT)?;
    print!("{}", output.stdout_text());
    let shown = output.stdout_text().contains("stress-ng");
    run(&["ctl", NAME, "powerdown"])?;
    let end = vm.wait(LIMIT)?;
    println!("The guest has powered off, status {:?}.", end.code());
    if shown && end.code() == Some(0) {
        Ok(())
    } else {
        Err("the report does not show the load, or the guest did not end well".into())
    }
}
