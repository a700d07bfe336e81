//! The Debian package and the archive, as `make package-check` installs and tries them: here of the lab's
//! static program, which `make static` builds in the same way.

use std::process::Command;

use integration::artefacts;
use integration::measure::skipped;

fn make(arguments: &[&str]) -> (bool, String) {
    let output = Command::new("make")
        .current_dir(artefacts::workspace())
        .args(["--no-print-directory"])
        .args(arguments)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

#[test]
fn package_and_archive_install_a_program_that_needs_nothing_else() {
    let program = &artefacts::binaries().unwrap().perfvisor;
    let (done, said) = make(&["package-check", &format!("BINARY={}", program.display())]);
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

/// A package names no library: of a program that needs some there is none.
#[test]
fn a_program_that_needs_libraries_is_not_packed() {
    let program = std::env::current_exe().unwrap();
    let (done, said) = make(&["deb", &format!("BINARY={}", program.display())]);
    assert!(!done && said.contains("make static"), "{said}");
}

/// `make deb` took the binary from where no build puts it, and CI did not see it, as it packs one by
/// `BINARY=`.
#[test]
fn the_binary_that_is_built_is_the_one_that_is_packed() {
    for target in ["deb", "tarball"] {
        let (done, said) = make(&["-n", target, "BINARY=", "TARGET_DIR=there"]);
        assert!(done, "{said}");
        let built = said
            .split("--target ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let binary = format!(" there/static/{}/release/perfvisor ", built.unwrap_or_default());
        assert!(said.contains(&binary), "{binary}: {said}");
    }
}
