//! Tests of the Linux guest and the lab host.

use super::*;

#[test]
fn newest_kernel_is_compared_numerically() {
    let names = [
        "linux-image-6.1.0-9-cloud-amd64",
        "linux-image-6.1.0-56-cloud-amd64",
        // Names that must be ignored: other kernel flavors, a metapackage of a series, a
        // metapackage without a version, debug symbols.
        "linux-image-6.9.0-1-rt-amd64",
        "linux-image-6.12-cloud-amd64",
        "linux-image-cloud-amd64",
        "linux-image-6.1.0-57-cloud-amd64-dbg",
    ];
    let newest = newest(names.map(str::to_owned).to_vec());
    assert_eq!(newest.as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
    assert!(numbers("linux-image-6.12.117+deb12-cloud-amd64") > numbers("linux-image-6.1.0-56-cloud-amd64"));
}

#[test]
fn images_without_stamp_are_outdated() {
    let dir = tempfile::tempdir().unwrap();
    let images = GuestImages::locate(dir.path(), &KernelChoice::Cloud);
    assert!(!images.is_current());
    fs::create_dir_all(&images.directory).unwrap();
    for path in [&images.vmlinux, &images.bz_image, &images.initrd] {
        fs::write(path, "x").unwrap();
    }
    fs::write(images.stamp(), recipe()).unwrap();
    assert!(!images.is_current(), "the lab's initrd is missing");
    for path in [&images.lab_initrd, &images.perf_cpio] {
        fs::write(path, "x").unwrap();
    }
    assert!(images.is_current());
    fs::write(images.stamp(), "another recipe\n").unwrap();
    assert!(!images.is_current());
}

#[test]
fn kernel_choice_is_parsed_from_command_line() {
    assert_eq!(KernelChoice::parse("newest"), KernelChoice::Newest);
    assert_eq!(
        KernelChoice::parse("linux-image-rt-amd64"),
        KernelChoice::Package("linux-image-rt-amd64".into())
    );
}
