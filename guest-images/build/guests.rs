//! Compiles the bare-metal guests or copies prebuilt ones.
//!
//! This file only uses the standard library, because `packaging/source.sh` compiles it as a program
//! without cargo.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// Contents of this file, which determine the compiler and linker options.
const BUILD_SCRIPT: &[u8] = include_bytes!("guests.rs");
/// Name of the file that contains the fingerprint of the sources, in a directory of prebuilt
/// guests.
const FINGERPRINT: &str = "sources.fnv1a";

/// Names of the kernels to build. Each is a directory below `bare-metal/` and the name of an output
/// file.
pub const KERNELS: [&str; 5] = ["selftest", "vpmu", "exact", "rdpmc", "validate"];

/// Compiler flags for freestanding privileged code.
///
/// They exclude SSE registers, the red zone and position independence, and include frame pointers
/// for call chains. CET markers are excluded because the instruction emulator of a software-only
/// KVM does not support ENDBR64.
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

/// Entry point of the program that `packaging/source.sh` builds from this file.
#[allow(dead_code, reason = "it is a module elsewhere")]
fn main() {
    make(&out_dir());
}

/// Returns the output directory that cargo assigns to the build script.
pub fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

/// Compiles the bare-metal guests or copies prebuilt ones into `out_dir`.
pub fn make(out_dir: &Path) {
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let source_dir = manifest_dir.join("bare-metal");
    println!("cargo:rerun-if-changed={}", source_dir.display());
    for file in ["build.rs", "build/guests.rs"] {
        println!("cargo:rerun-if-changed={file}");
    }
    let prebuilt = manifest_dir.join("prebuilt");
    // Cargo treats a missing file as changed.
    if prebuilt.exists() {
        println!("cargo:rerun-if-changed={}", prebuilt.display());
    }
    for variable in ["GUEST_CC", "GUEST_LD", "GUEST_ELF_DIR"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }

    let fingerprint = format!("{:016x}\n", fingerprint(&source_dir));
    if let Some(dir) = env::var_os("GUEST_ELF_DIR") {
        return take(Path::new(&dir), out_dir);
    }
    let tools_named = ["GUEST_CC", "GUEST_LD"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    if !tools_named && let Ok(made_of) = fs::read_to_string(prebuilt.join(FINGERPRINT)) {
        if made_of == fingerprint {
            return take(&prebuilt, out_dir);
        }
        println!(
            "cargo::warning=the sources of the guests are not those of guest-images/prebuilt: compiling them"
        );
    }
    compile(&source_dir, out_dir);
    let file = out_dir.join(FINGERPRINT);
    fs::write(&file, fingerprint).unwrap_or_else(|e| fail(&format!("cannot write {}: {e}", file.display())));
}

/// Copies the prebuilt guests from the directory `from`.
fn take(from: &Path, out_dir: &Path) {
    for kernel in KERNELS {
        let file = from.join(format!("{kernel}.elf"));
        println!("cargo:rerun-if-changed={}", file.display());
        let image = fs::read(&file).unwrap_or_else(|e| {
            fail(&format!(
                "cannot read the guest {}: {e}; GUEST_ELF_DIR names a directory of {}",
                file.display(),
                KERNELS.map(|kernel| format!("{kernel}.elf")).join(", ")
            ))
        });
        if !image.starts_with(b"\x7fELF") {
            fail(&format!("{} is no guest: it is no ELF file", file.display()));
        }
        let to = out_dir.join(format!("{kernel}.elf"));
        fs::write(&to, image).unwrap_or_else(|e| fail(&format!("cannot write {}: {e}", to.display())));
    }
}

/// Computes the 64-bit FNV-1a hash of the path and contents of every source file and of this file.
/// The hash detects accidental changes and does not protect against tampering.
fn fingerprint(source_dir: &Path) -> u64 {
    let mut files = Vec::new();
    list(source_dir, &mut files);
    files.sort();
    let mut hash = 0xCBF2_9CE4_8422_2325;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes.iter().chain(&[0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    };
    add(BUILD_SCRIPT);
    for file in files {
        let name = file.strip_prefix(source_dir).unwrap_or(&file);
        add(name.as_os_str().as_encoded_bytes());
        add(&fs::read(&file).unwrap_or_else(|e| fail(&format!("cannot read {}: {e}", file.display()))));
    }
    hash
}

/// Appends the paths of all files below `dir` to `files`.
fn list(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in entries(dir) {
        if entry.is_dir() {
            list(&entry, files);
        } else {
            files.push(entry);
        }
    }
}

/// Returns the paths of the entries of a directory.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| fail(&format!("cannot read {}: {e}", dir.display())));
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

/// Compiles and links all bare-metal guests.
fn compile(source_dir: &Path, out_dir: &Path) {
    let cc = env::var("GUEST_CC").unwrap_or_else(|_| "gcc".to_owned());
    let ld = env::var("GUEST_LD").unwrap_or_else(|_| "ld".to_owned());
    // Debug information accounts for two thirds of a guest's size, and all guests are embedded in
    // the program.
    let release = env::var_os("PROFILE").is_some_and(|profile| profile == "release");
    let without_debugging: &[&str] = if release { &["--strip-debug"] } else { &[] };
    let library = compile_dir(&cc, source_dir, "lib", out_dir);
    for kernel in KERNELS {
        let mut objects = compile_dir(&cc, source_dir, kernel, out_dir);
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

/// Compiles every `.c` and `.S` file of a directory and returns the objects, sorted by name.
fn compile_dir(cc: &str, source_dir: &Path, name: &str, out_dir: &Path) -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = entries(&source_dir.join(name))
        .into_iter()
        .filter(|path| matches!(path.extension().and_then(OsStr::to_str), Some("c" | "S")))
        .collect();
    sources.sort();
    let object_dir = out_dir.join(name);
    fs::create_dir_all(&object_dir)
        .unwrap_or_else(|e| fail(&format!("cannot create {}: {e}", object_dir.display())));
    // The output must not depend on the location of the source tree.
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

/// Runs a tool and aborts the build with a one-line message on failure.
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
             (Debian: apt-get install gcc binutils), name another in {variable}, or build the archive that \
             `make source` makes, which has them compiled"
        )),
    }
}

/// Aborts the build with a one-line message.
pub fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    exit(1);
}
