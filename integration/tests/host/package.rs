//! Tests the Debian package and the release archive, like `make package-check`. They contain the
//! static program that is built for the lab, which is built in the same way as by `make build`.

use std::process::Command;

use integration::artefacts;
use integration::measure::skipped;

fn make(arguments: &[&str]) -> (bool, String) {
    let output = Command::new("make")
        .current_dir(artefacts::workspace())
        .args(["--no-print-directory"])
        .args(arguments)
        // The compression level is not under test, and the lowest level is six times as fast.
        .envs([("XZ_OPT", "-0"), ("DPKG_DEB_COMPRESSOR_LEVEL", "0")])
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

#[test]
fn package_and_archive_install_standalone_program() {
    // Strip the program, because compressing the symbols of the development build would take most
    // of the time.
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("perfvisor");
    let stripped = Command::new("strip")
        .arg("-o")
        .args([&program, &artefacts::binaries().unwrap().perfvisor])
        .status();
    assert!(stripped.unwrap().success());
    let agent = &artefacts::binaries().unwrap().guest_agent;
    let (done, said) = make(&[
        "package-check",
        &format!("BINARY={}", program.display()),
        &format!("AGENT={}", agent.display()),
    ]);
    eprintln!("{said}");
    assert!(done, "{said}");
    if said.contains("SKIPPED") {
        return skipped("no root, or no overlay here", false);
    }
    for what in [".deb", ".tar.xz"] {
        let right =
            |line: &str| line.starts_with("try: ") && line.contains(what) && line.contains("are right");
        assert!(said.lines().any(right), "{what}: {said}");
    }
}

/// The packaging rejects a dynamically linked program, because the package declares no library
/// dependencies.
#[test]
fn package_rejects_dynamic_program() {
    let (done, said) = make(&["deb", "BINARY=/bin/cat"]);
    assert!(!done && said.contains("make build"), "{said}");
}

/// The package contains the program that the build has produced. Regression test: `make deb` once
/// took the program from a path to which no build writes, and CI did not detect this because it
/// sets `BINARY=`.
#[test]
fn package_contains_built_binary() {
    for target in ["deb", "tarball"] {
        let (done, said) = make(&["-n", target, "BINARY=", "TARGET_DIR=there"]);
        assert!(done, "{said}");
        let built = "there/x86_64-unknown-linux-gnu/release/perfvisor";
        let stripped = said
            .split("strip -o ")
            .nth(1)
            .and_then(|rest| rest.split_once(' '));
        let (packed, from) = stripped.unwrap_or_default();
        assert!(from.starts_with(&format!("{built} ")), "{built}: {said}");
        assert!(said.contains(&format!(".sh {packed} ")), "{packed}: {said}");
    }
}

/// The build compiles only Rust, because no dependency contains C code.
#[test]
fn product_compiles_no_c_code() {
    let tree = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(artefacts::workspace())
        .args([
            "tree",
            "--locked",
            "--offline",
            "-p",
            "perfvisor",
            "-e",
            "normal,build",
        ])
        .args([
            "--target",
            "x86_64-unknown-linux-gnu",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .output()
        .unwrap();
    let crates = String::from_utf8_lossy(&tree.stdout);
    assert!(
        crates.lines().any(|line| line.starts_with("lzma-rust2 ")),
        "{tree:?}"
    );
    for name in ["cc", "cmake", "bindgen", "pkg-config", "nasm-rs", "autotools"] {
        let has = |line: &str| line.split(' ').next() == Some(name);
        assert!(!crates.lines().any(has), "the program is built with {name}");
    }
}

/// The source archive contains prebuilt bare-metal guests. The build uses them if there is no
/// compiler, unless their sources have changed.
#[test]
fn source_archive_contains_prebuilt_guests() {
    let dir = tempfile::tempdir().unwrap();
    let archives = ["a.tar", "b.tar"].map(|name| dir.path().join(name));
    for archive in &archives {
        let said = Command::new(artefacts::workspace().join("packaging/source.sh"))
            .arg("0")
            .arg(archive)
            .output()
            .unwrap();
        if String::from_utf8_lossy(&said.stdout).contains("no checkout") {
            return skipped("the sources are no checkout of git", false);
        }
        assert!(said.status.success(), "{said:?}");
    }
    let [a, b] = archives.each_ref().map(|archive| std::fs::read(archive).unwrap());
    assert!(a == b, "the same sources gave two archives");

    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (unpacked, _) = run(Command::new("tar")
        .arg("-C")
        .arg(dir.path())
        .arg("-xf")
        .arg(&archives[0]));
    assert!(unpacked);
    let guests = dir.path().join("perfvisor-0/guest-images");
    let program = dir.path().join("build");
    let script = guests.join("build/guests.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let (built, _) = run(Command::new(rustc)
        .args(["--edition", "2024", "-o"])
        .arg(&program)
        .arg(script));
    assert!(built);
    let build = || {
        run(Command::new(&program)
            .env_clear()
            .env("CARGO_MANIFEST_DIR", &guests)
            .env("OUT_DIR", dir.path())
            .env("PROFILE", "release")
            .env("PATH", "/nonexistent"))
    };
    let (taken, said) = build();
    assert!(taken && !said.contains("warning"), "{said}");
    for guest in guest_images::bare_metal::GUESTS {
        let read = |dir: &std::path::Path| std::fs::read(dir.join(format!("{}.elf", guest.name))).unwrap();
        assert!(
            read(dir.path()) == read(&guests.join("prebuilt")),
            "{}",
            guest.name
        );
    }
    std::fs::write(guests.join("bare-metal/exact/plain.c"), "changed").unwrap();
    let (taken, said) = build();
    assert!(
        !taken && said.contains("are not those of") && said.contains("gcc"),
        "{said}"
    );
}
