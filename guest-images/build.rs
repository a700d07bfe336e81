//! Compiles the bare-metal guests in `bare-metal/` with the host's C compiler and linker.
//!
//! Each directory of [`KERNELS`] together with `bare-metal/lib` becomes one ELF64 multiboot kernel in
//! `OUT_DIR`.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// The kernels: directory under `bare-metal/` and name of the file made.
const KERNELS: [&str; 5] = ["selftest", "vpmu", "exact", "rdpmc", "validate"];

/// Freestanding code for the privileged levels: no SSE registers, no red zone, no position independence, no
/// CET markers (the instruction emulator of a software-only KVM does not know ENDBR64), frame pointers for
/// call chains.
const CFLAGS: [&str; 23] = [
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Wno-sign-compare",
    "-Wno-format-zero-length",
    "-m64",
    "-march=x86-64",
    "-mgeneral-regs-only",
    "-mno-sse",
    "-mno-red-zone",
    "-ffreestanding",
    "-nostdlib",
    "-static",
    "-fno-pic",
    "-no-pie",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-asynchronous-unwind-tables",
    "-fno-omit-frame-pointer",
    "-fno-strict-aliasing",
    "-fno-toplevel-reorder",
];

fn main() {
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let source_dir = manifest_dir.join("bare-metal");
    println!("cargo:rerun-if-changed={}", source_dir.display());
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=GUEST_CC");
    println!("cargo:rerun-if-env-changed=GUEST_LD");

    let cc = env::var("GUEST_CC").unwrap_or_else(|_| "gcc".to_owned());
    let ld = env::var("GUEST_LD").unwrap_or_else(|_| "ld".to_owned());
    // What a debugger needs of the guests is two thirds of them, and they are all in the program.
    let release = env::var_os("PROFILE").is_some_and(|profile| profile == "release");
    let without_debugging: &[&str] = if release { &["--strip-debug"] } else { &[] };
    let library = compile_dir(&cc, &source_dir, "lib", &out_dir);
    for kernel in KERNELS {
        let mut objects = compile_dir(&cc, &source_dir, kernel, &out_dir);
        objects.extend(library.iter().cloned());
        let mut link = Command::new(&ld);
        link.args([
            "-nostdlib",
            "-static",
            "-z",
            "noexecstack",
            "-z",
            "max-page-size=4096",
        ])
        .args(["--build-id=none", "-T"])
        .arg(source_dir.join("link.ld"))
        .args(without_debugging)
        .arg("-o")
        .arg(out_dir.join(format!("{kernel}.elf")))
        .args(&objects);
        run(link, "GUEST_LD");
    }
}

/// Compiles every `.c` and `.S` file of one directory and returns the objects, in the order of their names.
fn compile_dir(cc: &str, source_dir: &Path, name: &str, out_dir: &Path) -> Vec<PathBuf> {
    let dir = source_dir.join(name);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| fail(&format!("cannot read {}: {e}", dir.display())));
    let mut sources: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| matches!(path.extension().and_then(OsStr::to_str), Some("c" | "S")))
        .collect();
    sources.sort();
    let object_dir = out_dir.join(name);
    fs::create_dir_all(&object_dir)
        .unwrap_or_else(|e| fail(&format!("cannot create {}: {e}", object_dir.display())));
    // Two source trees at different places must give the same bytes.
    let prefix_map = format!("-ffile-prefix-map={}=bare-metal", source_dir.display());
    let compile = |source: &PathBuf| {
        let file_name = source
            .file_name()
            .expect("a directory entry has a name")
            .to_string_lossy();
        let object = object_dir.join(format!("{file_name}.o"));
        let mut compile = Command::new(cc);
        compile
            .args(CFLAGS)
            .arg(&prefix_map)
            .arg("-I")
            .arg(source_dir.join("lib"));
        compile.arg("-c").arg(source).arg("-o").arg(&object);
        run(compile, "GUEST_CC");
        object
    };
    sources.iter().map(compile).collect()
}

/// Runs a tool and ends the build with one line if that fails.
fn run(mut command: Command, variable: &str) {
    let tool = command.get_program().to_string_lossy().into_owned();
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            fail(&format!(
                "`{tool}` failed while building the bare-metal guests ({})",
                output.status
            ));
        }
        Err(e) => fail(&format!(
            "cannot run `{tool}`, needed to build the bare-metal guests: {e}; install gcc and binutils for x86-64 \
             (Debian: apt-get install gcc binutils) or name another in {variable}"
        )),
    }
}

/// Ends the build with one clear line.
fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    exit(1);
}
