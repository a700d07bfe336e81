//! Tests profiling of a real Linux guest with a fixture of its memory and registers.
//!
//! Create the fixture with `vmm/guest-profile/tests/fixtures/make-linux-fixture.py
//! target/profile-fixture`, which boots the stock Debian cloud kernel with KASLR under QEMU's TCG.
//! Without the fixture, the tests are skipped.

use std::collections::HashMap;
use std::path::PathBuf;

use guest_profile::locate::{self, KernelAnchorRegisters};
use guest_profile::programs::GuestSymbols;
use guest_profile::task::{TaskLayout, TaskReader};
use guest_profile::unwind::{
    CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER, CallChain, KernelUnwinder, UnwindLimits, UnwindStop, walk,
};
use guest_profile::{GuestMemoryReadBudget, GuestPhys, GuestRegs, MappedGuestPage};
use kernel_images::image::KernelImage;
use kernel_images::symbols::KernelSymbols;
use test_support::skip;

struct MemoryFile(std::fs::File);

/// A page of the memory file, given by its guest-physical address.
struct FilePage<'f>(&'f std::fs::File, u64);

impl GuestPhys for MemoryFile {
    type Page<'a> = FilePage<'a>;

    fn page(&self, gpa: u64) -> Option<FilePage<'_>> {
        Some(FilePage(&self.0, gpa & !0xfff))
    }
}

impl MappedGuestPage for FilePage<'_> {
    fn read(&self, offset: usize, buf: &mut [u8]) -> bool {
        std::os::unix::fs::FileExt::read_exact_at(self.0, buf, self.1 + offset as u64).is_ok()
    }
}

fn fixture() -> Option<PathBuf> {
    let dir = std::env::var_os("PERFVISOR_PROFILE_FIXTURE")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            PathBuf::from(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../target/profile-fixture"
            ))
        });
    if dir.join("user.mem").exists() && dir.join("kernel.mem").exists() {
        return Some(dir);
    }
    let why = format!(
        "no fixture in {}; make it with vmm/guest-profile/tests/fixtures/make-linux-fixture.py",
        dir.display()
    );
    // Skipping is no failure in CI, because no make target creates the fixture.
    skip::skipped(&why, false);
    None
}

struct Guest {
    mem: MemoryFile,
    regs: GuestRegs,
    image: KernelImage,
    anchors: KernelAnchorRegisters,
    kallsyms: KernelSymbols,
    slide: u64,
    dir: PathBuf,
    console: String,
}

fn guest(which: &str) -> Option<Guest> {
    let dir = fixture()?;
    let text = std::fs::read_to_string(dir.join(format!("{which}.regs"))).unwrap();
    let r: HashMap<&str, u64> = text
        .lines()
        .filter_map(|l| l.split_once(' '))
        .map(|(n, v)| (n, u64::from_str_radix(v, 16).unwrap()))
        .collect();
    let regs = GuestRegs {
        rip: r["rip"],
        rsp: r["rsp"],
        rbp: r["rbp"],
        rcx: r["rcx"],
        rdx: r["rdx"],
        rdi: r["rdi"],
        r10: r["r10"],
        r11: r["r11"],
        r13: r["r13"],
        rflags: r["rflags"],
        cr0: r["cr0"],
        cr3: r["cr3"],
        cr4: r["cr4"],
        efer: r["efer"],
        cpl: r["cpl"] as u8,
        code64: true,
        gs_base: r["gs_base"],
        kernel_gs_base: r["kernel_gs_base"],
        // The fixture does not contain the other registers. Only samples in the entry code need
        // some of them.
        ..GuestRegs::default()
    };
    let kallsyms = KernelSymbols::parse_text(&std::fs::read(dir.join("kallsyms")).unwrap()).unwrap();
    let image = KernelImage::parse("vmlinux", &std::fs::read(dir.join("vmlinux")).unwrap()).unwrap();
    // The value of the LSTAR register, which the fixture does not contain.
    let lstar = kallsyms.by_name("entry_SYSCALL_64").unwrap().address;
    let slide = kallsyms
        .by_name("_text")
        .unwrap()
        .address
        .wrapping_sub(0xffff_ffff_8100_0000);
    Some(Guest {
        mem: MemoryFile(std::fs::File::open(dir.join(format!("{which}.mem"))).unwrap()),
        regs,
        image,
        anchors: KernelAnchorRegisters { lstar, idt_base: 0 },
        kallsyms,
        slide,
        console: std::fs::read_to_string(dir.join("console")).unwrap(),
        dir,
    })
}

/// Returns limits without a time limit, so that results do not depend on the speed of the host.
fn untimed() -> UnwindLimits {
    UnwindLimits {
        max_time: None,
        ..UnwindLimits::default()
    }
}

impl Guest {
    fn walk(&self, out: &mut [u64]) -> CallChain {
        let kernel = KernelUnwinder::new(&self.image, self.slide);
        walk(&self.mem, &self.regs, Some(kernel), &untimed(), out)
    }

    /// Resolves the addresses of a call chain to names. The names of kernel functions come from the
    /// guest's kallsyms, and those of user functions from addresses that the program itself has
    /// printed.
    fn names(&self, chain: &[u64]) -> Vec<String> {
        let functions: Vec<(u64, &str)> = self
            .console
            .lines()
            .filter_map(|l| l.trim().strip_prefix("FIXTURE fn "))
            .filter_map(|l| l.split_once(" 0x"))
            .map(|(n, a)| (u64::from_str_radix(a, 16).unwrap(), n))
            .collect();
        chain
            .iter()
            .map(|&a| match a {
                CONTEXT_GUEST_KERNEL => "[kernel]".into(),
                CONTEXT_GUEST_USER => "[user]".into(),
                a => match self.kallsyms.resolve(a) {
                    Some((s, _)) => s.name.to_owned(),
                    None => functions
                        .iter()
                        .filter(|(f, _)| *f <= a && a - f < 0x400)
                        .max()
                        .map_or(format!("{a:#x}"), |(_, n)| (*n).to_owned()),
                },
            })
            .collect()
    }
}

#[test]
fn stripped_image_symbols_match_running_kernel() {
    let Some(g) = guest("user") else { return };
    let mine = g
        .image
        .symbols()
        .expect("kallsyms in the image")
        .relocated(g.slide);
    let mine: HashMap<&str, Vec<u64>> = mine.iter().fold(HashMap::new(), |mut m, s| {
        m.entry(s.name).or_default().push(s.address);
        m
    });
    // kallsyms also lists symbols of modules, which are located above the image.
    let image_end = g.kallsyms.by_name("_end").unwrap().address;
    let theirs: Vec<_> = g.kallsyms.iter().filter(|s| s.address < image_end).collect();
    assert!(
        theirs.len() > 50_000,
        "only {} symbols in the fixture",
        theirs.len()
    );
    let wrong: Vec<_> = theirs
        .iter()
        .filter(|s| !mine.get(s.name).is_some_and(|a| a.contains(&s.address)))
        .take(5)
        .collect();
    assert!(wrong.is_empty(), "{wrong:x?}");
}

#[test]
fn kaslr_slide_is_found_and_verified() {
    for which in ["user", "kernel"] {
        let Some(g) = guest(which) else { return };
        let place = locate::place(&g.mem, &g.regs, &g.image, &g.anchors).unwrap();
        assert_eq!((place.slide, place.verified), (g.slide, true));
    }
}

#[test]
fn kernel_is_read_from_memory_without_image() {
    let Some(g) = guest("kernel") else { return };
    let kernel = locate::read_kernel(&g.mem, &g.regs, &g.anchors).unwrap();
    assert_eq!(kernel.banner(), g.image.banner());
    let symbols = kernel.symbols().unwrap();
    for name in ["_text", "do_syscall_64", "vfs_read", "linux_banner"] {
        assert_eq!(
            symbols.by_name(name).unwrap().address,
            g.kallsyms.by_name(name).unwrap().address,
            "{name}"
        );
    }
    assert_eq!(kernel.orc().unwrap().len(), g.image.orc().unwrap().len());
    let (mut a, mut b) = ([0; 128], [0; 128]);
    let unwind = KernelUnwinder::new(&kernel, 0);
    let by_memory = walk(&g.mem, &g.regs, Some(unwind), &untimed(), &mut a);
    let by_image = g.walk(&mut b);
    assert_eq!((by_memory, a), (by_image, b));
    assert!(TaskLayout::new(&kernel, 0).unwrap().has_maps());
}

#[test]
fn user_sample_is_walked_to_main() {
    let Some(g) = guest("user") else { return };
    let mut out = [0; 128];
    let chain = g.walk(&mut out);
    let names = g.names(&out[..chain.len]);
    eprintln!("{chain:?} {names:?}");
    assert_eq!(names[0], "[user]");
    assert!(["hot", "warm", "cool"].contains(&names[1].as_str()), "{names:?}");
    assert_eq!(names[2..4], ["work", "main"]);
    assert_eq!(chain.kernel_end, None);
}

#[test]
fn kernel_sample_is_walked_through_the_system_call_to_main() {
    let Some(g) = guest("kernel") else { return };
    let mut out = [0; 128];
    let chain = g.walk(&mut out);
    let names = g.names(&out[..chain.len]);
    eprintln!("{chain:?} {names:?}");
    assert_eq!(chain.kernel_end, Some(UnwindStop::Complete));
    let has = |n: &str| names.iter().any(|x| x == n);
    assert!(has("vfs_read") && has("do_syscall_64"), "{names:?}");
    assert_eq!(names[chain.kernel_frames], "entry_SYSCALL_64_after_hwframe");
    assert_eq!(names[chain.kernel_frames + 1], "[user]");
    let user = &names[chain.kernel_frames + 2..];
    assert_eq!(user[1..4], ["kernel_phase", "work", "main"], "{names:?}");
}

#[test]
fn real_chain_takes_far_fewer_reads_than_the_limit() {
    for which in ["user", "kernel"] {
        let Some(g) = guest(which) else { return };
        let ram = std::fs::read(g.dir.join(format!("{which}.mem"))).unwrap();
        let kernel = KernelUnwinder::new(&g.image, g.slide);
        let mut out = [0; 128];
        let rounds = 1000;
        let start = std::time::Instant::now();
        let chains: Vec<CallChain> = (0..rounds)
            .map(|_| walk(&ram[..], &g.regs, Some(kernel), &untimed(), &mut out))
            .collect();
        // The times are only printed, because the test must not depend on the speed of the host.
        eprintln!("{which}: {:?} a chain, {:?}", start.elapsed() / rounds, chains[0]);
        assert!(
            chains[0].reads * 10 < UnwindLimits::default().max_reads,
            "{:?}",
            chains[0]
        );
        assert!(chains.iter().all(|c| *c == chains[0]));
    }
}

#[test]
fn task_mappings_match_proc_maps() {
    for which in ["user", "kernel"] {
        let Some(g) = guest(which) else { return };
        let layout = TaskLayout::new(&g.image, g.slide).unwrap();
        let mut reader = TaskReader::new(&layout, &g.mem, &g.regs).unwrap();
        let mut budget = GuestMemoryReadBudget::new(4096, None);
        let base = g.regs.kernel_per_cpu_base().unwrap();
        let task = reader.current(base, &mut budget).unwrap();
        let pid: u32 = g
            .console
            .lines()
            .find_map(|l| l.trim().strip_prefix("FIXTURE pid "))
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(
            (task.pid, task.tid, task.comm().to_string()),
            (pid, pid, "three".into())
        );
        let mut seen = 0;
        for line in g
            .console
            .lines()
            .filter_map(|l| l.trim().strip_prefix("FIXTURE map "))
        {
            let f: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = f[0].split_once('-').unwrap();
            let hex = |s| u64::from_str_radix(s, 16).unwrap();
            if f.get(5).is_some_and(|p| *p == "[stack]" || *p == "[heap]") {
                continue; // these mappings grow
            }
            let m = reader
                .mapping(
                    task.mm,
                    hex(start) + 0x123,
                    &mut GuestMemoryReadBudget::new(512, None),
                )
                .expect(line);
            // The kernel may have merged or split anonymous mappings since the fixture was created,
            // but not file mappings.
            if let Some(path) = f.get(5).filter(|p| p.starts_with('/')) {
                assert_eq!(
                    (m.start, m.end, m.file_offset),
                    (hex(start), hex(end), hex(f[2])),
                    "{line}"
                );
                assert_eq!(m.executable, f[1].contains('x'));
                let mut buf = [0; 256];
                assert_eq!(
                    reader.file_path(m.file, &mut buf, &mut GuestMemoryReadBudget::new(512, None)),
                    Some(*path)
                );
                seen += 1;
            }
        }
        assert!(seen > 5);
        // The build ID in memory equals the build ID of the file.
        let mut mount = GuestSymbols::new(&g.dir);
        let of_file = mount.build_id("/three").unwrap();
        let code = g
            .console
            .lines()
            .find(|l| l.contains("r-xp") && l.ends_with("/three"));
        let start = code.unwrap().trim().trim_start_matches("FIXTURE map ");
        let start = u64::from_str_radix(start.split('-').next().unwrap(), 16).unwrap();
        let mut budget = GuestMemoryReadBudget::new(1500, None);
        let code = reader.mapping(task.mm, start, &mut budget).unwrap();
        assert_eq!(reader.build_id(task.mm, &code, &mut budget), Some(of_file));
        assert_eq!(reader.mapping(task.mm, 0x1000, &mut budget), None);
    }
}

#[test]
fn guest_mount_names_functions_and_lines() {
    let Some(g) = guest("user") else { return };
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("usr/bin")).unwrap();
    std::fs::copy(g.dir.join("three"), root.path().join("usr/bin/three")).unwrap();
    let layout = TaskLayout::new(&g.image, g.slide).unwrap();
    let mut reader = TaskReader::new(&layout, &g.mem, &g.regs).unwrap();
    let mut budget = GuestMemoryReadBudget::new(4096, None);
    let task = reader
        .current(g.regs.kernel_per_cpu_base().unwrap(), &mut budget)
        .unwrap();
    let m = reader.mapping(task.mm, g.regs.rip, &mut budget).unwrap();
    let mut mount = GuestSymbols::new(root.path());
    let object = mount.object("/usr/bin/three").unwrap();
    let address = object
        .address_of_file_offset(g.regs.rip - m.start + m.file_offset)
        .unwrap();
    let name = object.resolve(address).unwrap().name;
    assert!(["hot", "warm", "cool"].contains(&name.as_str()), "{name}");
    assert!(object.line(address).unwrap().contains("three.c:"));
    assert!(mount.object("/usr/bin/none").is_none());
    assert_eq!(mount.problems().len(), 1);
}
