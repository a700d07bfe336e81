//! Tests that the same calls yield the same errors, bytes, states and counts on kernel events and
//! on events of this crate.
#![expect(unsafe_code, reason = "calls of the system")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use perf_core::attr::{ATTR_SIZE_MAX, ATTR_SIZE_VER8};
use perf_core::pmu::host::HostPmu;
use perf_core::*;
use proptest::prelude::*;

use crate::common::memory::fault;
use crate::common::thread::{catch_signals, this_tid};
use test_support::skip;

const PAGE_FAULTS: u64 = 2;
const DUMMY: u64 = 9;
const PAGE: usize = 4096;
/// Number of page faults in one unit of work, far more than other page faults that occur meanwhile.
const WORK: usize = 100;

const ENABLE: u64 = 0x2400;
const DISABLE: u64 = 0x2401;
const REFRESH: u64 = 0x2402;
const RESET: u64 = 0x2403;
const PERIOD: u64 = 0x4008_2404;
const SET_OUTPUT: u64 = 0x2405;
const ID: u64 = 0x8008_2407;
const GROUP: u64 = 1;

/// Returns the result of a system call if it is not negative, otherwise the error number.
fn checked(result: i64) -> Result<i64, i32> {
    if result >= 0 {
        return Ok(result);
    }
    Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn kernel_open_bytes(bytes: &mut [u8], group: i32, flags: u64) -> Result<OwnedFd, i32> {
    // The kernel reads `size` bytes regardless of the buffer.
    let mut page = [0; 2 * PAGE];
    page[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: the attribute is writable, and readable for more bytes than its size can state.
    let fd =
        checked(unsafe { libc::syscall(libc::SYS_perf_event_open, page.as_mut_ptr(), 0, -1, group, flags) });
    bytes.copy_from_slice(&page[..bytes.len()]);
    // SAFETY: the file descriptor was just opened here.
    fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn kernel_open(attr: &Attr, group: Option<&OwnedFd>) -> Result<OwnedFd, i32> {
    kernel_open_bytes(&mut attr.to_bytes(), group.map_or(-1, |fd| fd.as_raw_fd()), 0)
}

fn ioctl(fd: &OwnedFd, call: u64, argument: u64) -> Result<(), i32> {
    // SAFETY: the calls used here take numbers, or a pointer to a number that the caller keeps
    // alive.
    checked(i64::from(unsafe { libc::ioctl(fd.as_raw_fd(), call, argument) })).map(|_| ())
}

fn set_period(fd: &OwnedFd, period: u64) -> Result<(), i32> {
    ioctl(fd, PERIOD, &raw const period as u64)
}

fn kernel_id(fd: &OwnedFd) -> u64 {
    let mut id = 0u64;
    ioctl(fd, ID, &raw mut id as u64).unwrap();
    id
}

fn kernel_read(fd: &OwnedFd, buf: &mut [u8]) -> Result<usize, i32> {
    // SAFETY: the buffer is writable for its length.
    checked(unsafe { libc::read(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) } as i64)
        .map(|n| n as usize)
}

/// A core that has the calling thread as its only vCPU.
struct ThreadCore {
    core: PerfCore,
    session: Session,
    _vcpu: Arc<VcpuEventContext>,
}

fn ours() -> Option<ThreadCore> {
    if let Err(libc::EACCES | libc::EPERM | libc::ENOSYS) = kernel_open(&counting(DUMMY), None) {
        skip::skipped("this user may not open perf events", false);
        return None;
    }
    let core = PerfCore::new(PerfCoreConfig::default());
    core.register(Arc::new(HostPmu::software(Some(catch_signals()))));
    let vcpu = core.add_vcpu(VcpuId(0), this_tid()).unwrap();
    vcpu.sched_in();
    let session = core.session(0, SessionRole::Admin);
    Some(ThreadCore {
        core,
        session,
        _vcpu: vcpu,
    })
}

impl ThreadCore {
    fn open(&self, attr: &Attr, group: Option<&EventHandle>) -> Result<EventHandle, i32> {
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        // Clears `exclude_kernel`, because the driver counts software events at every privilege
        // level and rejects attributes that exclude one. The kernel event keeps `exclude_kernel`,
        // because counting the kernel requires a privilege.
        let attr = Attr {
            exclude_kernel: false,
            ..attr.clone()
        };
        self.core
            .open(&self.session, attr, target, group, OpenFlags::default())
            .map_err(|e| e.errno())
    }

    fn open_bytes(&self, bytes: &mut [u8]) -> Result<EventHandle, i32> {
        let mut page = [0; 2 * PAGE];
        page[..bytes.len()].copy_from_slice(bytes);
        let attr = Attr::from_bytes(&mut page).map_err(|e| e.errno());
        bytes.copy_from_slice(&page[..bytes.len()]);
        self.open(&attr?, None)
    }
}

fn counting(config: u64) -> Attr {
    Attr {
        exclude_kernel: true,
        read_format: ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING,
        ..Attr::counting(EventType::SOFTWARE, config)
    }
}

fn sampling(period: u64) -> Attr {
    Attr {
        sample_period: period,
        sample_type: SampleType::IP,
        ..counting(DUMMY)
    }
}

/// Takes [`WORK`] page faults on this thread.
fn work() {
    fault(WORK);
}

fn no<T>(result: Result<T, i32>) -> i32 {
    result.map_or_else(|errno| errno, |_| 0)
}

#[test]
fn attribute_errors_match_kernel() {
    let Some(ours) = ours() else { return };
    let good = counting(DUMMY).to_bytes();
    let with = |size: u32, extra: &[(usize, u8)]| {
        let mut bytes = vec![0; PAGE];
        bytes[..good.len()].copy_from_slice(&good);
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        for (at, byte) in extra {
            bytes[*at] = *byte;
        }
        bytes
    };
    let mut cases: Vec<Vec<u8>> = [0, 1, 63, 64, 65, 72, 73, 80, 4095, 4096, 4097, u32::MAX]
        .map(|size| with(size, &[]))
        .into();
    // Nonzero bytes beyond the known attributes: once within the size, and once beyond it, where
    // they are ignored.
    cases.push(with(4096, &[(4000, 1)]));
    cases.push(with(3000, &[(4000, 1)]));
    // An undefined flag, sample type and read format: the highest bit of each.
    cases.extend([(47, 0x80), (31, 0x80), (39, 0x80)].map(|byte| with(72, &[byte])));
    for mut bytes in cases {
        let (mut theirs, size) = (bytes.clone(), u32::from_ne_bytes(bytes[4..8].try_into().unwrap()));
        let kernel = no(kernel_open_bytes(&mut theirs, -1, 0));
        assert_eq!(no(ours.open_bytes(&mut bytes)), kernel, "size {size}");
        let told = |b: &[u8]| u32::from_ne_bytes(b[4..8].try_into().unwrap()) != size;
        assert_eq!(
            told(&bytes),
            told(&theirs),
            "size {size}: what would do is written back"
        );
    }
    for flags in [1, 2, 3, 16, 1 << 63] {
        let kernel = kernel_open_bytes(&mut counting(DUMMY).to_bytes(), -1, flags);
        // The output flag is valid without a target. The kernel ignores it.
        let known = flags & !3 == 0;
        assert_eq!(
            (kernel.is_ok(), OpenFlags::from_bits(flags).is_ok()),
            (known, known)
        );
    }
    let attrs = [
        sampling(1 << 63),
        sampling((1 << 63) - 1),
        sampling(1 << 40).with_freq(),
        sampling(100).with_freq(),
        counting(1 << 40),
    ];
    for attr in attrs {
        assert_eq!(
            no(ours.open(&attr, None)),
            no(kernel_open(&attr, None)),
            "{attr:?}"
        );
    }
}

/// The attributes of a newer perf version are accepted, although they are longer than the layout
/// that this crate supports, because the additional bytes are zero.
#[test]
fn attribute_of_a_current_perf_is_understood() {
    let Some(ours) = ours() else { return };
    let mut attr = perf_event_open_sys::bindings::perf_event_attr {
        type_: EventType::SOFTWARE.0,
        size: size_of::<perf_event_open_sys::bindings::perf_event_attr>() as u32,
        config: DUMMY,
        sample_type: (SampleType::TIME | SampleType::IDENTIFIER).bits(),
        read_format: (ReadFormat::ID | ReadFormat::GROUP).bits(),
        ..Default::default()
    };
    attr.set_sample_id_all(1);
    attr.set_disabled(1);
    attr.set_exclude_kernel(1);
    assert!(attr.size >= ATTR_SIZE_VER8);
    let bytes = |attr: &perf_event_open_sys::bindings::perf_event_attr| {
        // SAFETY: the attribute consists of integers without padding and is read for its length.
        unsafe { std::slice::from_raw_parts((&raw const *attr).cast::<u8>(), size_of_val(attr)) }.to_vec()
    };
    // Checks that the running kernel, which may be older than the bindings, accepts the attributes.
    assert_eq!(no(kernel_open_bytes(&mut bytes(&attr), -1, 0)), 0);
    let handle = ours.open_bytes(&mut bytes(&attr)).unwrap();
    assert_eq!(handle.attr().sample_type.bits(), attr.sample_type);
    assert!(handle.attr().sample_id_all && handle.attr().disabled);

    // The stack size is ignored, because the samples have no user stack.
    attr.sample_stack_user = 8;
    assert_eq!(no(kernel_open_bytes(&mut bytes(&attr), -1, 0)), 0);
    assert_eq!(no(ours.open_bytes(&mut bytes(&attr))), 0);

    // Nonzero bytes of later attribute versions are rejected, and the supported size is returned.
    let mut asked = bytes(&attr);
    asked.resize(ATTR_SIZE_MAX as usize, 0);
    asked[4..8].copy_from_slice(&ATTR_SIZE_MAX.to_ne_bytes());
    asked[ATTR_SIZE_MAX as usize - 1] = 1;
    assert_eq!(no(kernel_open_bytes(&mut asked.clone(), -1, 0)), libc::E2BIG);
    assert_eq!(no(ours.open_bytes(&mut asked)), libc::E2BIG);
    assert_eq!(asked[4..8], ATTR_SIZE_VER8.to_ne_bytes());
}

#[test]
fn group_and_ioctl_errors_match_kernel() {
    let Some(ours) = ours() else { return };
    let plain = counting(DUMMY);
    let kernel = kernel_open(&plain, None).unwrap();
    let handle = ours.open(&plain, None).unwrap();
    let kernel_member = kernel_open(&plain, Some(&kernel)).unwrap();
    let member = ours.open(&plain, Some(&handle)).unwrap();
    let pinned = plain.clone().with_pinned();
    let exclusive = plain.clone().with_exclusive();
    for (attr, kernel_group, group) in [
        (&plain, &kernel_member, &member),
        (&pinned, &kernel, &handle),
        (&exclusive, &kernel, &handle),
    ] {
        let refused = no(kernel_open(attr, Some(kernel_group)));
        assert_eq!(
            (refused, no(ours.open(attr, Some(group)))),
            (libc::EINVAL, libc::EINVAL)
        );
    }

    let errno = |result: Result<(), PerfEventControlError>| result.map_or_else(|e| e.errno(), |()| 0);
    let attrs = [
        plain.clone(),
        sampling(100),
        sampling(100).with_freq(),
        sampling(100).with_inherit(),
    ];
    for attr in attrs {
        let (kernel, handle) = (kernel_open(&attr, None).unwrap(), ours.open(&attr, None).unwrap());
        for period in [0, 1, 50, (1 << 63) - 1, 1 << 63, u64::MAX] {
            // Skips frequencies above 1000, because the kernel's limit is configurable.
            if attr.freq && period > 1000 && period >> 63 == 0 {
                continue;
            }
            assert_eq!(
                errno(handle.set_period(period)),
                no(set_period(&kernel, period)),
                "period {period} of {attr:?}"
            );
        }
        assert_eq!(
            errno(handle.refresh(1)),
            no(ioctl(&kernel, REFRESH, 1)),
            "refresh of {attr:?}"
        );
        for (call, result) in [
            (ENABLE, handle.enable(EventOrGroup::Event)),
            (DISABLE, handle.disable(EventOrGroup::Event)),
            (RESET, handle.reset(EventOrGroup::Event)),
        ] {
            assert_eq!(errno(result), no(ioctl(&kernel, call, 0)));
        }
        let to_itself = ioctl(&kernel, SET_OUTPUT, kernel.as_raw_fd() as u64);
        assert_eq!(errno(handle.set_output(Some(&handle))), no(to_itself));
        assert_eq!(
            errno(handle.set_output(None)),
            no(ioctl(&kernel, SET_OUTPUT, u64::MAX))
        );
    }

    // Rings: maps valid sizes and then another size, and checks that an event with a ring cannot be
    // redirected.
    let map = |fd: &OwnedFd, pages: usize| {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping that lasts as long as the process.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            no(checked(-1))
        } else {
            0
        }
    };
    for data_pages in [3, 4, 8, 4, 0] {
        let ours = handle.map(data_pages, true).map_or_else(|e| e.errno(), |_| 0);
        assert_eq!(ours, map(&kernel, 1 + data_pages), "{data_pages} data pages");
    }
    let other = ours.open(&plain, None).unwrap();
    let kernel_other = kernel_open(&plain, None).unwrap();
    let refused = no(ioctl(&kernel, SET_OUTPUT, kernel_other.as_raw_fd() as u64));
    assert_eq!(
        (refused, errno(handle.set_output(Some(&other)))),
        (libc::EINVAL, libc::EINVAL)
    );
}

#[test]
fn read_layouts_match_kernel() {
    let Some(ours) = ours() else { return };
    // Finds the highest read format bit that this kernel supports. Linux 6.0 added the last one.
    let known = (0..5).rev().map(|bit| 1 << bit).find(|bit| {
        let read_format = ReadFormat::from_bits_truncate(*bit);
        kernel_open(&counting(DUMMY).with_read_format(read_format), None).is_ok()
    });
    for bits in 0..2 * known.unwrap() {
        for members in 1..4 {
            let attr = counting(DUMMY).with_read_format(ReadFormat::from_bits_truncate(bits));
            let mut kernel = vec![kernel_open(&attr, None).unwrap()];
            let mut handles = vec![ours.open(&attr, None).unwrap()];
            for _ in 1..members {
                kernel.push(kernel_open(&attr, Some(&kernel[0])).unwrap());
                handles.push(ours.open(&attr, Some(&handles[0])).unwrap());
            }
            let ids: Vec<_> = kernel.iter().map(kernel_id).collect();
            for (fd, handle) in kernel.iter().zip(&handles) {
                let (mut a, mut b) = ([0u8; 256], [0u8; 256]);
                let size = kernel_read(fd, &mut a).unwrap();
                assert_eq!(handle.read_bytes(&mut b).unwrap(), size, "{bits:#x}");
                let words = |bytes: &[u8]| -> Vec<u64> {
                    let words = bytes[..size].chunks(8);
                    words.map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect()
                };
                // Classifies each word of a reading as a small number, an ID or a time. Both
                // readings must have the same classes in the same order.
                let what = |word: u64, id: &dyn Fn(u64) -> Option<usize>| match (id(word), word) {
                    (Some(at), _) => format!("id of {at}"),
                    (None, small @ 0..=3) => small.to_string(),
                    _ => "time".into(),
                };
                let of_kernel = |id| ids.iter().position(|i| *i == id);
                let of_ours = |id| handles.iter().position(|h| h.id() == id);
                let theirs: Vec<_> = words(&a).into_iter().map(|w| what(w, &of_kernel)).collect();
                let mine: Vec<_> = words(&b).into_iter().map(|w| what(w, &of_ours)).collect();
                // Compares only if IDs cannot be mistaken for small numbers.
                if handles[0].id() > 3 {
                    assert_eq!(mine, theirs, "{bits:#x}");
                }
                for short in [0, 7, size - 1] {
                    assert_eq!(no(kernel_read(fd, &mut a[..short])), libc::ENOSPC);
                    let ours = handle.read_bytes(&mut b[..short]).map_err(|e| e.errno());
                    assert_eq!(no(ours), libc::ENOSPC);
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Enable(usize, bool),
    Disable(usize, bool),
    Reset(usize, bool),
    Work,
    CloseLeader,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0usize..3, any::<bool>()).prop_map(|(i, group)| Op::Enable(i, group)),
        3 => (0usize..3, any::<bool>()).prop_map(|(i, group)| Op::Disable(i, group)),
        1 => (0usize..3, any::<bool>()).prop_map(|(i, group)| Op::Reset(i, group)),
        4 => Just(Op::Work),
        1 => Just(Op::CloseLeader),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// After the same operations on a group of three events, the counts equal those of the kernel,
    /// and the times advance in the same steps as in the kernel.
    #[test]
    fn group_history_matches_kernel(disabled: [bool; 3], pinned: bool, ops in prop::collection::vec(op(), 1..25)) {
        let Some(ours) = ours() else { return Ok(()) };
        let (mut kernel, mut handles): (Vec<OwnedFd>, Vec<EventHandle>) = Default::default();
        for (i, disabled) in disabled.into_iter().enumerate() {
            let attr = Attr { disabled, pinned: pinned && i == 0, ..counting(PAGE_FAULTS) };
            kernel.push(kernel_open(&attr, kernel.first()).unwrap());
            handles.push(ours.open(&attr, handles.first()).unwrap());
        }
        // Runs the workload once before measuring, so that it has no further one-time page faults.
        work();
        let read = |kernel: &[OwnedFd], handles: &[EventHandle]| -> Vec<[(u64, u64, u64); 2]> {
            kernel.iter().zip(handles).map(|(fd, handle)| {
                let mut buf = [0; 24];
                assert_eq!(kernel_read(fd, &mut buf), Ok(24));
                let word = |i: usize| u64::from_ne_bytes(buf[8 * i..8 * i + 8].try_into().unwrap());
                let r = handle.read().unwrap();
                [(word(0), word(1), word(2)), (r.value, r.time_enabled_ns, r.time_running_ns)]
            }).collect()
        };
        for (fd, handle) in kernel.iter().zip(&handles) {
            ioctl(fd, RESET, 0).unwrap();
            handle.reset(EventOrGroup::Event).unwrap();
        }
        let mut last = read(&kernel, &handles);
        for op in ops {
            let scope = |group| if group { (GROUP, EventOrGroup::Group) } else { (0, EventOrGroup::Event) };
            match op {
                Op::Enable(i, group) if i < kernel.len() => {
                    ioctl(&kernel[i], ENABLE, scope(group).0).unwrap();
                    handles[i].enable(scope(group).1).unwrap();
                }
                Op::Disable(i, group) if i < kernel.len() => {
                    ioctl(&kernel[i], DISABLE, scope(group).0).unwrap();
                    handles[i].disable(scope(group).1).unwrap();
                }
                Op::Reset(i, group) if i < kernel.len() => {
                    ioctl(&kernel[i], RESET, scope(group).0).unwrap();
                    handles[i].reset(scope(group).1).unwrap();
                }
                Op::CloseLeader if kernel.len() == 3 => {
                    kernel.remove(0);
                    handles.remove(0);
                    last.remove(0);
                }
                _ => work(),
            }
            // No event changes between these two reads, so their difference shows which times
            // advance.
            let settled = read(&kernel, &handles);
            let now = read(&kernel, &handles);
            for (i, ((last, settled), now)) in last.iter().zip(&settled).zip(&now).enumerate() {
                let pieces = |count: u64| (count + WORK as u64 / 2) / WORK as u64;
                prop_assert_eq!(pieces(now[1].0), pieces(now[0].0), "member {} after {:?}", i, op);
                let goes_on = |a: (u64, u64, u64), b: (u64, u64, u64)| (b.1 > a.1, b.2 > a.2);
                prop_assert_eq!(goes_on(settled[1], now[1]), goes_on(settled[0], now[0]), "member {} after {:?}", i, op);
                prop_assert!(now[1].1 >= last[1].1 && now[1].2 >= last[1].2);
            }
            last = now;
        }
    }
}
