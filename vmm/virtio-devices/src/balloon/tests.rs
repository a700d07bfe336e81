use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

use super::control::BalloonRequestError;
use super::pages::PAGE_BYTES;
use super::statistics::BalloonStatisticTag;
use super::*;
use crate::serve::continue_at_used_ring;
use crate::serve::testing::{
    BUFFERS, Driver, DriverView, HOSTILE, MEMORY_BYTES, activation, memory, wait_until,
};

/// Frame number of the first page that the tests give to the balloon.
const FIRST_PFN: u32 = 0x280;
const WRITE: u16 = 2;

fn config() -> BalloonConfig {
    BalloonConfig {
        size_mib: 1,
        deflate_on_oom: true,
        statistics_interval_s: 3600,
        free_page_reporting: true,
    }
}

fn balloon(config: BalloonConfig) -> BalloonDevice {
    BalloonDevice::new(config, MEMORY_BYTES as u64, RamOrigin::Empty).unwrap()
}

/// Returns the driver's side of the inflate, deflate, statistics and reporting queues.
fn drivers(memory: &GuestMemoryMmap) -> [Driver<'_>; 4] {
    [0x1000, 0x4000, 0x7000, 0xA000].map(|start| Driver::at(memory, 64, start))
}

fn activate(balloon: &mut BalloonDevice, memory: &GuestMemoryMmap, drivers: &[Driver<'_>]) -> DriverView {
    let queues = drivers.iter().map(|driver| {
        let mut active = driver.active();
        continue_at_used_ring(&mut active.queue, memory).unwrap();
        Some(active)
    });
    let (mut activation, view) = activation(memory, queues.collect());
    activation.features = balloon.features();
    balloon.activate(activation).unwrap();
    view
}

/// Offers a descriptor chain with the page frame numbers `pfns` to the device, and waits until the
/// device returns it. `head` is the chain's first descriptor.
#[track_caller]
fn send_pages(driver: &mut Driver<'_>, memory: &GuestMemoryMmap, head: u16, pfns: &[u32]) {
    let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
    memory.write_slice(&bytes, GuestAddress(BUFFERS)).unwrap();
    let len = u32::try_from(bytes.len()).unwrap();
    let used = driver.used().len();
    send(driver, head, &[Descriptor::new(BUFFERS, len, 0, 0)]);
    driver.wait_until_used(used + 1);
}

/// Offers a descriptor chain and notifies the device.
fn send(driver: &mut Driver<'_>, head: u16, chain: &[Descriptor]) {
    driver.offer_chain(head, chain);
    driver.kick();
}

fn fill_pages(memory: &GuestMemoryMmap, first: u32, count: u32) {
    for pfn in first..first + count {
        let at = GuestAddress(u64::from(pfn) * PAGE_BYTES);
        memory.write_slice(&[7; 4096], at).unwrap();
    }
}

fn first_byte(memory: &GuestMemoryMmap, pfn: u32) -> u8 {
    let at = GuestAddress(u64::from(pfn) * PAGE_BYTES);
    memory.read_obj(at).unwrap()
}

#[test]
fn inflated_pages_are_released_and_deflated_ones_acknowledged() {
    let memory = memory();
    let mut drivers = drivers(&memory);
    let mut balloon = balloon(config());
    let _view = activate(&mut balloon, &memory, &drivers);
    fill_pages(&memory, FIRST_PFN, 16);
    // Inflate in descending order of page numbers, as Linux does.
    let pages: Vec<u32> = (FIRST_PFN + 4..FIRST_PFN + 12).rev().collect();
    send_pages(&mut drivers[0], &memory, 0, &pages);
    for pfn in FIRST_PFN..FIRST_PFN + 16 {
        let is_inflated = pages.contains(&pfn);
        assert_eq!(first_byte(&memory, pfn) == 0, is_inflated, "{pfn:#x}");
    }
    assert_eq!(balloon.control().state().released_bytes, 8 * PAGE_BYTES);
    send_pages(&mut drivers[1], &memory, 0, &pages);
    assert_eq!(drivers[1].used(), [(0, 0)]);
    assert_eq!(balloon.control().state().released_bytes, 8 * PAGE_BYTES);
}

/// Invalid page frame numbers (outside RAM, repeated, or beyond the limit per chain) do not release
/// other pages. The device processes the next chain.
#[test]
fn hostile_page_numbers_are_ignored() {
    let memory = memory();
    let mut drivers = drivers(&memory);
    let mut balloon = balloon(config());
    let _view = activate(&mut balloon, &memory, &drivers);
    fill_pages(&memory, FIRST_PFN, 4);
    let end = u32::try_from(MEMORY_BYTES).unwrap() / 4096;
    let hostile = [
        u32::MAX,
        end,
        u32::MAX - 1,
        1 << 20,
        0xFEE00,
        FIRST_PFN,
        FIRST_PFN,
        end,
        FIRST_PFN,
    ];
    send_pages(&mut drivers[0], &memory, 0, &hostile);
    assert_eq!(balloon.control().state().released_bytes, PAGE_BYTES);
    let many = vec![FIRST_PFN + 1; pages::MAX_CHAIN_PAGES];
    let more = [many.as_slice(), &[FIRST_PFN + 2]].concat();
    send_pages(&mut drivers[0], &memory, 1, &more);
    assert_eq!(balloon.control().state().released_bytes, 2 * PAGE_BYTES);
    assert_eq!(
        (0..4)
            .map(|n| first_byte(&memory, FIRST_PFN + n))
            .collect::<Vec<_>>(),
        [0, 0, 7, 7]
    );
}

/// The guest may release the pages of its own queues. The device may stop, but works again after a
/// reset.
#[test]
fn release_of_the_queues_does_not_break_the_device() {
    let memory = memory();
    let mut balloon = balloon(config());
    {
        let mut drivers = drivers(&memory);
        let _view = activate(&mut balloon, &memory, &drivers);
        let queues: Vec<u32> = (0..0x10).chain([0x100]).collect();
        let bytes: Vec<u8> = queues.iter().flat_map(|pfn: &u32| pfn.to_le_bytes()).collect();
        memory.write_slice(&bytes, GuestAddress(BUFFERS)).unwrap();
        send(&mut drivers[0], 0, &[Descriptor::new(BUFFERS, 17 * 4, 0, 0)]);
        wait_until(|| balloon.control().state().released_bytes == 17 * PAGE_BYTES);
        balloon.reset();
    }
    let mut drivers = drivers(&memory);
    let _view = activate(&mut balloon, &memory, &drivers);
    send_pages(&mut drivers[0], &memory, 0, &[FIRST_PFN]);
    assert_eq!(balloon.control().state().released_bytes, 18 * PAGE_BYTES);
}

#[test]
fn hostile_chains_are_returned() {
    let memory = memory();
    for queue in 0..4 {
        let mut balloon = balloon(config());
        let mut drivers = drivers(&memory);
        let view = activate(&mut balloon, &memory, &drivers);
        let direction = if queue == 3 { WRITE } else { 0 };
        drivers[queue].offer_hostile(direction);
        drivers[queue].kick();
        // The statistics queue returns one buffer per interval.
        if queue == 2 {
            balloon.control().set_statistics_interval(1).unwrap();
            wait_until(|| !drivers[2].used().is_empty());
        } else {
            wait_until(|| drivers[queue].used().len() == usize::from(HOSTILE));
        }
        balloon.reset();
        assert!(!view.needs_reset());
    }
}

#[test]
fn broken_ring_requests_reset() {
    let memory = memory();
    for queue in 0..4 {
        let mut balloon = balloon(config());
        let mut drivers = drivers(&memory);
        let view = activate(&mut balloon, &memory, &drivers);
        // Break the ring: the available index exceeds the queue size.
        drivers[queue].mock.avail().idx().store(1000_u16.to_le());
        drivers[queue].kick();
        wait_until(|| view.needs_reset());
        drivers[queue].mock.avail().idx().store(0);
        drivers[queue].mock.used().idx().store(0);
        drivers[queue].offer(0);
    }
}

#[test]
fn reported_pages_are_released_in_whole_pages() {
    let memory = memory();
    let mut drivers = drivers(&memory);
    let mut balloon = balloon(config());
    let _view = activate(&mut balloon, &memory, &drivers);
    fill_pages(&memory, FIRST_PFN, 8);
    let start = u64::from(FIRST_PFN) * PAGE_BYTES;
    let chain = [
        Descriptor::new(start + 1, 3 * 4096, WRITE | 1, 1),
        Descriptor::new(start + 5 * PAGE_BYTES, 4096, WRITE | 1, 2),
        Descriptor::new(u64::MAX - 4095, u32::MAX, WRITE, 0),
    ];
    send(&mut drivers[3], 0, &chain);
    wait_until(|| drivers[3].used() == [(0, 0)]);
    let bytes: Vec<u8> = (0..8).map(|n| first_byte(&memory, FIRST_PFN + n)).collect();
    assert_eq!(bytes, [7, 0, 0, 7, 7, 0, 7, 7]);
    assert_eq!(balloon.control().state().released_bytes, 3 * PAGE_BYTES);
}

/// The queue of a feature that the driver does not accept is omitted. For example, the reporting
/// queue has index 2 without statistics.
#[test]
fn queues_follow_the_accepted_features() {
    let memory = memory();
    let mut balloon = balloon(config());
    assert_eq!(balloon.features(), 0b10_0110);
    assert_eq!(balloon.queue_max_sizes().len(), 4);
    let mut drivers = drivers(&memory);
    let queues = [0, 1, 3].map(|n: usize| Some(drivers[n].active()));
    let (mut only_reporting, _view) = activation(&memory, queues.into_iter().chain([None]).collect());
    only_reporting.features = 1 << VIRTIO_BALLOON_F_PAGE_REPORTING;
    balloon.activate(only_reporting).unwrap();
    let at = u64::from(FIRST_PFN) * PAGE_BYTES;
    send(&mut drivers[3], 0, &[Descriptor::new(at, 4096, WRITE, 0)]);
    wait_until(|| balloon.control().state().released_bytes == PAGE_BYTES);
    balloon.reset();
    let queues = vec![Some(drivers[0].active()), Some(drivers[1].active()), None, None];
    let (mut without_queue, _view) = activation(&memory, queues);
    without_queue.features = balloon.features();
    assert!(balloon.activate(without_queue).is_err());
    assert_eq!(self::balloon(BalloonConfig::default()).features(), 0);
    assert_eq!(self::balloon(BalloonConfig::default()).queue_max_sizes().len(), 2);
}

#[test]
fn target_change_notifies_the_driver() {
    let memory = memory();
    let drivers = drivers(&memory);
    let mut balloon = balloon(config());
    let control = balloon.control().clone();
    let view = activate(&mut balloon, &memory, &drivers);
    let target = |balloon: &BalloonDevice| {
        let mut data = [0; 4];
        balloon.read_config(0, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(target(&balloon), PAGES_PER_MIB);
    control.set_size_mib(3).unwrap();
    assert_eq!(view.changed.read().unwrap(), 1);
    assert_eq!(target(&balloon), 3 * PAGES_PER_MIB);
    let refused = control.set_size_mib(5).unwrap_err();
    assert_eq!(
        refused,
        BalloonRequestError::Size {
            size_mib: 5,
            memory_mib: 4
        }
    );
    assert_eq!(target(&balloon), 3 * PAGES_PER_MIB);
    balloon.reset();
    control.set_size_mib(0).unwrap();
    assert_eq!(
        target(&balloon),
        0,
        "the next driver reads the target when it starts"
    );
}

/// In the device configuration, the driver can write only the actual size, in accesses of any width
/// and at any offset.
#[test]
fn driver_writes_the_actual_size_only() {
    let mut balloon = balloon(config());
    balloon.write_config(4, &0x1234_5678_u32.to_le_bytes());
    balloon.write_config(5, &[0xAB]);
    assert_eq!(balloon.control().state().actual_pages, 0x1234_AB78);
    balloon.write_config(0, &[0xFF; 6]);
    balloon.write_config(7, &[0xFF; 64]);
    balloon.write_config(u64::MAX, &[0; 8]);
    let state = balloon.control().state();
    assert_eq!(
        (state.target_pages, state.actual_pages),
        (PAGES_PER_MIB, 0xFF34_FFFF)
    );
    let mut data = [1; 12];
    balloon.read_config(4, &mut data);
    assert_eq!(data, [0xFF, 0xFF, 0x34, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0]);
    // A driver that starts has an empty balloon. A driver that was stopped for a snapshot keeps its
    // balloon.
    balloon.quiesce();
    assert_eq!(balloon.control().state().actual_pages, 0xFF34_FFFF);
    balloon.reset();
    assert_eq!(balloon.control().state().actual_pages, 0);
}

fn entry(tag: u16, value: u64) -> Vec<u8> {
    [&tag.to_le_bytes()[..], &value.to_le_bytes()[..]].concat()
}

/// The device reads the statistics buffer as soon as it is available, and returns it when an update
/// is due. Unknown and incomplete statistics are ignored, and the last value of a repeated
/// statistic is used.
#[test]
fn statistics_are_read_and_updated() {
    let memory = memory();
    let mut drivers = drivers(&memory);
    let mut balloon = balloon(config());
    let control = balloon.control().clone();
    let _view = activate(&mut balloon, &memory, &drivers);
    let mut bytes = [
        entry(4, 1),
        entry(5, u64::MAX),
        entry(0x7FFF, 3),
        entry(4, 2),
        entry(15, 9),
    ]
    .concat();
    bytes.extend([0, 0, 1]);
    let at = GuestAddress(BUFFERS + 3);
    memory.write_slice(&bytes, at).unwrap();
    let len = u32::try_from(bytes.len()).unwrap();
    let pieces = [
        Descriptor::new(at.0, 7, 1, 1),
        Descriptor::new(at.0 + 7, len - 7, 0, 0),
    ];
    send(&mut drivers[2], 0, &pieces);
    wait_until(|| control.state().statistics.is_some());
    let statistics = control.state().statistics.unwrap();
    assert_eq!(statistics.get(BalloonStatisticTag::FreeMemory), Some(2));
    assert_eq!(statistics.get(BalloonStatisticTag::TotalMemory), Some(u64::MAX));
    assert_eq!(statistics.get(BalloonStatisticTag::DirectReclaim), Some(9));
    assert_eq!(statistics.get(BalloonStatisticTag::SwapIn), None);
    assert!(drivers[2].used().is_empty(), "no update is due");
    control.set_statistics_interval(7200).unwrap();
    wait_until(|| drivers[2].used() == [(0, 0)]);
    assert_eq!(drivers[2].vector.read().unwrap(), 1);
    memory.write_slice(&entry(0, 11), at).unwrap();
    send(&mut drivers[2], 1, &[Descriptor::new(at.0, 10, 0, 0)]);
    wait_until(|| {
        control
            .state()
            .statistics
            .unwrap()
            .get(BalloonStatisticTag::SwapIn)
            == Some(11)
    });
    assert_eq!(
        control
            .state()
            .statistics
            .unwrap()
            .get(BalloonStatisticTag::FreeMemory),
        None
    );
}

#[test]
fn statistics_cannot_be_switched_on_or_off() {
    let with = balloon(config());
    let refused = Err(BalloonRequestError::StatisticsStateChange);
    assert_eq!(with.control().set_statistics_interval(0), refused);
    assert_eq!(with.control().set_statistics_interval(2), Ok(()));
    assert_eq!(with.control().state().config.statistics_interval_s, 2);
    let without = balloon(BalloonConfig::default());
    assert_eq!(without.control().set_statistics_interval(1), refused);
    assert_eq!(without.control().set_statistics_interval(0), Ok(()));
}

/// The target size, actual size and statistics interval of a balloon survive a snapshot. The
/// restored device reads the statistics buffer in the queue again.
#[test]
fn restored_balloon_continues() {
    let memory = memory();
    let mut drivers = drivers(&memory);
    let mut source = balloon(config());
    let _view = activate(&mut source, &memory, &drivers);
    source.control().set_size_mib(2).unwrap();
    source.control().set_statistics_interval(60).unwrap();
    source.write_config(4, &300_u32.to_le_bytes());
    memory.write_slice(&entry(4, 5), GuestAddress(BUFFERS)).unwrap();
    drivers[2].write(0, &[Descriptor::new(BUFFERS, 10, 0, 0)]);
    source.quiesce();
    drivers[2].offer(0);
    let state = source.save_state();

    let mut target = balloon(config());
    assert!(target.restore_state(&state));
    let restored = target.control().state();
    assert_eq!(
        (restored.target_pages, restored.actual_pages),
        (2 * PAGES_PER_MIB, 300)
    );
    assert_eq!(restored.config.statistics_interval_s, 60);
    let _view = activate(&mut target, &memory, &drivers);
    drivers[2].kick();
    wait_until(|| target.control().state().statistics.is_some());
    send_pages(&mut drivers[0], &memory, 0, &[FIRST_PFN]);
    assert_eq!(target.control().state().released_bytes, PAGE_BYTES);
}

#[test]
fn impossible_saved_states_are_refused() {
    let state = balloon(config()).save_state();
    let mut target = balloon(config());
    assert!(target.restore_state(&state));
    assert!(!target.restore_state(&[]));
    assert!(!target.restore_state(&state[1..]));
    let larger = [&(4 * PAGES_PER_MIB + 1).to_le_bytes()[..], &state[4..]].concat();
    assert!(!target.restore_state(&larger));
    let without_statistics = [&state[..8], &[0, 0]].concat();
    assert!(!target.restore_state(&without_statistics));
}
