//! Serialization of the PMU state, for restoring it in another process or on another host.
//!
//! All numbers are little-endian. The layout consists of the magic `PVPM`, a vendor byte (1 Intel,
//! 2 AMD), the layout version of that vendor (u16), the length of the body (u32), the body, and the
//! CRC-32 of all preceding bytes (u32). The body contains the model, the registers, and the
//! counters, each preceded by its number so that a later version can add counters. The backing
//! (source of counts) of each counter is not saved, because the registers determine the events, and
//! the destination host chooses the backings.
//!
//! Layout version 1 does not store which counters requested a due PMI, nor whether its delivery was
//! deferred. [`Vpmu::restore`] then assumes that every possible counter requested the PMI. Versions
//! 1 and 2 do not store the measurement of the guest's PMI handler, so restoring them discards the
//! current measurement. Both versions can still be read. Version 4 ends with the branch records and
//! is written only for models that have them.

mod branches;
mod reader;

use crate::branches::BranchControls;
use crate::counter_events::{CounterEnableOutcome, CounterEventLoss, CounterEvents, CounterTimes};
use crate::events::{CounterBacking, CounterEventRequest};
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};
use crate::model::PmuModel;
use crate::model_name::{PmuGeneration, RequestedCounters, Vendor};
use crate::registers;
use crate::share::{HandlerPhase, SavedHandler};
use crate::vendor::{PmuRegister, PmuRegisters, RegisterWriteEffect};
use crate::vpmu::{Counter, DuePmi, RestoredPmi, Vpmu};

use branches::read_branches;
use reader::Reader;

const MAGIC: [u8; 4] = *b"PVPM";
const HEADER_BYTES: usize = 4 + 1 + 2 + 4;
const CRC_BYTES: usize = 4;

/// Bit in the first byte of the saved model. Set if the model has branch records.
const KIND_WITH_BRANCHES: u8 = 0x80;

/// Values of the byte that describes the due PMI in a saved state. Version 1 has no value for a
/// deferred PMI.
const PMI_NONE: u8 = 0;
const PMI_DUE: u8 = 1;
const PMI_DEFERRED: u8 = 2;

/// Values of the byte that describes the progress of the guest's PMI handler in a saved state.
const HANDLER_RETURNED: u8 = 0;
const HANDLER_REARMED: u8 = 1;
const HANDLER_RUNNING: u8 = 2;

/// Layout version of saved states of models without branch records.
const VERSION_WITHOUT_BRANCHES: u16 = 3;
/// Layout version of saved states of models with branch records, which is the newest version.
const VERSION_WITH_BRANCHES: u16 = 4;

/// Returns the version of the body layout of a model. Programs that do not support branch records
/// can read the state of a model without branch records.
const fn layout_version(model: &PmuModel) -> u16 {
    if model.has_branch_records() {
        VERSION_WITH_BRANCHES
    } else {
        VERSION_WITHOUT_BRANCHES
    }
}

/// Error returned when a saved state cannot be restored.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum VpmuStateError {
    /// The bytes do not start with the magic `PVPM`.
    #[error("not a saved PMU state: it does not start with PVPM")]
    Magic,
    /// The saved state is truncated or followed by other bytes.
    #[error("the saved PMU state has {have} bytes; must be {need}; it is truncated or has extra data")]
    Length {
        /// Actual length of the saved state, in bytes.
        have: usize,
        /// Expected length of the saved state, in bytes.
        need: usize,
    },
    /// The checksum of the saved state does not match its contents.
    #[error("the saved PMU state is damaged: its checksum does not match")]
    Checksum,
    /// The layout version of the saved state is unsupported.
    #[error(
        "unsupported layout version {have} of the saved PMU state; must be at most {known}; \
        restore it with a newer program"
    )]
    Version {
        /// Layout version of the saved state.
        have: u16,
        /// Newest layout version that this program supports.
        known: u16,
    },
    /// The saved state is for a different PMU model.
    #[error(
        "the saved state is for a PMU {saved}, but this one is {here}; start the VM with the same \
        --pmu options"
    )]
    OtherModel {
        /// Model of the saved PMU.
        saved: PmuModel,
        /// Model of the PMU into which the state should be restored.
        here: PmuModel,
    },
    /// A saved value that no PMU of this model can have. The text describes it.
    #[error("invalid saved PMU state: {0}")]
    Impossible(&'static str),
}

impl Vpmu {
    /// Serializes the state of the PMU, which continues to run. Brings the values of running
    /// counters up to date first.
    ///
    /// The event filter, the PMI rate limit and the share of PMI handlers are configuration and not
    /// part of the state. Set them again after [`Self::restore`].
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a PMU has at most 19 counters, and a body of a few hundred bytes"
    )]
    pub fn save(&mut self, events: &mut dyn CounterEvents) -> Vec<u8> {
        self.fold_all(events);
        let mut body = Vec::with_capacity(512);
        write_model(&mut body, &self.model);
        body.extend(self.registers.fixed_control.to_le_bytes());
        body.extend(self.registers.global_control.to_le_bytes());
        body.extend(self.registers.global_status.to_le_bytes());
        body.extend(self.registers.debug_control.to_le_bytes());
        let pmi = self.due_pmi();
        body.push(match pmi {
            None => PMI_NONE,
            Some(DuePmi { deferred: false, .. }) => PMI_DUE,
            Some(DuePmi { deferred: true, .. }) => PMI_DEFERRED,
        });
        body.extend(pmi.map_or(0, |pmi| pmi.sources).to_le_bytes());
        write_handler(&mut body, self.pmi_share.save(events.time()));
        let existing = self.model.counters_mask();
        body.push(existing.count_ones() as u8);
        for counter in counters_in(existing) {
            body.push(counter.bit() as u8);
            let selector = if counter.fixed_number().is_none() {
                self.registers.selectors[counter.slot()]
            } else {
                0
            };
            let held = &self.counters[counter.slot()];
            for field in [selector, held.value, held.overflows, held.pmi_requests] {
                body.extend(field.to_le_bytes());
            }
        }

        self.write_branches(&mut body);

        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len() + CRC_BYTES);
        bytes.extend(MAGIC);
        bytes.push(vendor_byte(self.model.vendor()));
        bytes.extend(layout_version(&self.model).to_le_bytes());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        bytes.extend(crc32(&bytes).to_le_bytes());
        bytes
    }

    /// Restores a saved state into a PMU that has not counted yet and has no events. Counters start
    /// at the next [`Vpmu::reconcile`].
    ///
    /// # Errors
    /// Returns the same errors as [`Vpmu::restore`].
    pub fn restore_before_use(&mut self, bytes: &[u8]) -> Result<(), VpmuStateError> {
        self.restore(bytes, &mut NoEvents)
    }

    /// Restores a saved state. Counters resume at the next [`Vpmu::reconcile`].
    ///
    /// # Errors
    /// Returns a [`VpmuStateError`] if the bytes are not a valid state for this model. The PMU is
    /// then unchanged.
    pub fn restore(&mut self, bytes: &[u8], events: &mut dyn CounterEvents) -> Result<(), VpmuStateError> {
        let (version, body) = check_frame(bytes)?;
        let mut reader = Reader { rest: body };
        let model = read_model(&mut reader)?;
        if model != self.model {
            return Err(VpmuStateError::OtherModel {
                saved: model,
                here: self.model,
            });
        }
        if bytes[4] != vendor_byte(model.vendor()) {
            return Err(VpmuStateError::Impossible("its vendor is not that of its model"));
        }
        let mut registers = PmuRegisters {
            selectors: Default::default(),
            fixed_control: reader.u64()?,
            global_control: reader.u64()?,
            global_status: reader.u64()?,
            debug_control: reader.u64()?,
            branches: BranchControls::default(),
            svme: false,
        };
        let pmi = read_pmi(&mut reader, &model, version)?;
        let handler = read_handler(&mut reader, &model, version)?;
        let counters = read_counters(&mut reader, &model, &mut registers)?;
        let branches = read_branches(&mut reader, &model, version, &mut registers)?;
        if !reader.rest.is_empty() {
            return Err(VpmuStateError::Length {
                have: body.len(),
                need: body.len() - reader.rest.len(),
            });
        }
        check_registers(&model, &registers)?;

        self.release(events);
        self.registers = registers;
        self.counters = counters;
        self.branches = branches;
        self.restore_pmi(pmi);
        self.pmi_share.restore(handler, events.time());
        self.note_all_svme();
        self.mark_all();
        Ok(())
    }
}

/// Reads the counters, and writes their event selectors to `registers`.
fn read_counters(
    reader: &mut Reader<'_>,
    model: &PmuModel,
    registers: &mut PmuRegisters,
) -> Result<[Counter; MAX_COUNTERS], VpmuStateError> {
    let mut counters = [Counter::default(); MAX_COUNTERS];
    let mut seen = 0;
    for _ in 0..reader.u8()? {
        let counter = CounterIndex::from_bit(u32::from(reader.u8()?))
            .filter(|&c| model.has_counter(c) && seen & c.mask() == 0)
            .ok_or(VpmuStateError::Impossible(
                "a counter is there twice or does not exist",
            ))?;
        seen |= counter.mask();
        let selector = reader.u64()?;
        let value = reader.u64()?;
        if value != model.width().truncate(value) {
            return Err(VpmuStateError::Impossible("a counter is wider than its width"));
        }
        if counter.fixed_number().is_none() {
            registers.selectors[counter.slot()] = selector;
        } else if selector != 0 {
            return Err(VpmuStateError::Impossible("a fixed counter has a selector"));
        }
        counters[counter.slot()] = Counter::restored(value, reader.u64()?, reader.u64()?);
    }
    if seen != model.counters_mask() {
        return Err(VpmuStateError::Impossible("a counter is missing"));
    }
    Ok(counters)
}

/// Counter events that count nothing, for a PMU whose vCPU is not attached to a thread yet.
struct NoEvents;

impl CounterEvents for NoEvents {
    fn program(&mut self, _: CounterIndex, _: Option<&CounterEventRequest>) -> CounterBacking {
        CounterBacking::None
    }

    fn enable(&mut self, _: CounterIndex, _: Option<u64>) -> (CounterEnableOutcome, u64) {
        (CounterEnableOutcome::Counting(CounterBacking::None), 0)
    }

    fn disable(&mut self, _: CounterIndex) -> u64 {
        0
    }

    fn pause(&mut self, _: u64, _: &mut dyn FnMut(CounterIndex, u64)) {}

    fn resume(&mut self, _: u64, _: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64 {
        0
    }

    fn count(&mut self, _: CounterIndex) -> u64 {
        0
    }

    fn arm(&mut self, _: CounterIndex, overflow_in: u64) -> u64 {
        overflow_in
    }

    fn may_have_lost(&mut self) -> bool {
        false
    }

    fn event_loss(&mut self, _: CounterIndex) -> Option<CounterEventLoss> {
        None
    }

    fn now_ns(&mut self) -> u64 {
        0
    }

    fn times(&mut self, _: CounterIndex) -> CounterTimes {
        CounterTimes::default()
    }
}

/// Reads the due PMI from the body of a saved state with the layout version `version`.
fn read_pmi(
    reader: &mut Reader<'_>,
    model: &PmuModel,
    version: u16,
) -> Result<Option<RestoredPmi>, VpmuStateError> {
    let due = reader.u8()?;
    if version == 1 {
        return match due {
            PMI_NONE => Ok(None),
            PMI_DUE => Ok(Some(RestoredPmi::UnknownSources)),
            _ => Err(VpmuStateError::Impossible("the PMI is neither due nor not due")),
        };
    }
    let sources = reader.u64()?;
    if sources & !model.counters_mask() != 0 {
        return Err(VpmuStateError::Impossible(
            "a counter that does not exist requested the PMI",
        ));
    }
    match (due, sources) {
        (PMI_NONE, 0) => Ok(None),
        (PMI_NONE, _) => Err(VpmuStateError::Impossible(
            "counters requested a PMI that is not due",
        )),
        (PMI_DEFERRED, 0) => Err(VpmuStateError::Impossible(
            "no counter requested the deferred PMI",
        )),
        (PMI_DUE | PMI_DEFERRED, sources) => Ok(Some(RestoredPmi::Known(DuePmi {
            sources,
            deferred: due == PMI_DEFERRED,
        }))),
        _ => Err(VpmuStateError::Impossible("the PMI is neither due nor not due")),
    }
}

fn write_handler(body: &mut Vec<u8>, handler: SavedHandler) {
    body.push(match handler.phase {
        HandlerPhase::Returned => HANDLER_RETURNED,
        HandlerPhase::Rearmed => HANDLER_REARMED,
        HandlerPhase::Running => HANDLER_RUNNING,
    });
    for field in [
        handler.sources,
        handler.unserved,
        handler.elapsed_ns,
        handler.remaining_ns,
    ] {
        body.extend(field.to_le_bytes());
    }
}

/// Reads the measurement of the PMI handler from the body of a saved state with the layout version
/// `version`.
fn read_handler(
    reader: &mut Reader<'_>,
    model: &PmuModel,
    version: u16,
) -> Result<SavedHandler, VpmuStateError> {
    if version < 3 {
        return Ok(SavedHandler::default());
    }
    let phase = match reader.u8()? {
        HANDLER_RETURNED => HandlerPhase::Returned,
        HANDLER_REARMED => HandlerPhase::Rearmed,
        HANDLER_RUNNING => HandlerPhase::Running,
        _ => return Err(VpmuStateError::Impossible("the PMI handler is in no known phase")),
    };
    let handler = SavedHandler {
        phase,
        sources: reader.u64()?,
        unserved: reader.u64()?,
        elapsed_ns: reader.u64()?,
        remaining_ns: reader.u64()?,
    };
    if (handler.sources | handler.unserved) & !model.counters_mask() != 0 {
        return Err(VpmuStateError::Impossible(
            "the PMI handler has to serve a counter that does not exist",
        ));
    }
    if !handler.is_possible() {
        return Err(VpmuStateError::Impossible(
            "the times of the PMI handler are contradictory",
        ));
    }
    Ok(handler)
}

/// Checks that a guest could have written each of the register values `registers`.
fn check_registers(model: &PmuModel, registers: &PmuRegisters) -> Result<(), VpmuStateError> {
    let ops = registers::of(model.vendor());
    let at_reset = ops.at_reset(model);
    let writable = |register, value| ops.write(model, register, value) == RegisterWriteEffect::Store(value);
    for counter in counters_in(model.counters_mask() & u64::from(u32::MAX)) {
        if !writable(
            PmuRegister::Selector(counter),
            registers.selectors[counter.slot()],
        ) {
            return Err(VpmuStateError::Impossible("a selector has reserved bits"));
        }
    }
    // Reset values are valid even if the model lacks the register and does not accept writes.
    for (register, value, initial, what) in [
        (
            PmuRegister::FixedControl,
            registers.fixed_control,
            at_reset.fixed_control,
            "the fixed counters' control has reserved bits",
        ),
        (
            PmuRegister::GlobalControl,
            registers.global_control,
            at_reset.global_control,
            "the global control has reserved bits",
        ),
        (
            PmuRegister::GlobalStatusSet,
            registers.global_status,
            at_reset.global_status,
            "the global status has reserved bits",
        ),
        (
            PmuRegister::DebugControl,
            registers.debug_control,
            at_reset.debug_control,
            "the debug control has reserved bits",
        ),
    ] {
        if value != initial && !writable(register, value) {
            return Err(VpmuStateError::Impossible(what));
        }
    }
    Ok(())
}

/// Checks magic, version, length and checksum, and returns the layout version and the body.
fn check_frame(bytes: &[u8]) -> Result<(u16, &[u8]), VpmuStateError> {
    if bytes.len() < MAGIC.len() || bytes[..MAGIC.len()] != MAGIC {
        return Err(VpmuStateError::Magic);
    }
    let least = HEADER_BYTES + CRC_BYTES;
    if bytes.len() < least {
        return Err(VpmuStateError::Length {
            have: bytes.len(),
            need: least,
        });
    }
    let mut header = Reader {
        rest: &bytes[MAGIC.len()..HEADER_BYTES],
    };
    if !matches!(header.u8()?, 1 | 2) {
        return Err(VpmuStateError::Impossible("its vendor is neither Intel nor AMD"));
    }
    let have = header.u16()?;
    let known = VERSION_WITH_BRANCHES;
    if have == 0 || have > known {
        return Err(VpmuStateError::Version { have, known });
    }
    let need = least.saturating_add(header.u32()? as usize);
    if bytes.len() != need {
        return Err(VpmuStateError::Length {
            have: bytes.len(),
            need,
        });
    }
    let (checked, crc) = bytes.split_at(bytes.len() - CRC_BYTES);
    if crc != crc32(checked).to_le_bytes() {
        return Err(VpmuStateError::Checksum);
    }
    Ok((have, &checked[HEADER_BYTES..]))
}

const fn vendor_byte(vendor: Vendor) -> u8 {
    match vendor {
        Vendor::Intel => 1,
        Vendor::Amd => 2,
    }
}

/// Serializes the model, one byte per field: generation, version, number of general-purpose
/// counters, fixed counter bitmap, width. The generation byte also distinguishes Intel models with
/// and without transactions, and models with and without branch records.
#[expect(
    clippy::cast_possible_truncation,
    reason = "at most 15 counters of at most 63 bits"
)]
fn write_model(body: &mut Vec<u8>, model: &PmuModel) {
    let (kind, version) = match model.generation() {
        PmuGeneration::Off(vendor) => (0, vendor_byte(vendor)),
        PmuGeneration::Intel(version) if model.has_transactions() => (5, version),
        PmuGeneration::Intel(version) => (1, version),
        PmuGeneration::AmdK7 => (2, 0),
        PmuGeneration::AmdCore => (3, 0),
        PmuGeneration::AmdV2 => (4, 0),
    };
    let branches = if model.has_branch_records() {
        KIND_WITH_BRANCHES
    } else {
        0
    };
    body.extend([
        kind | branches,
        version,
        model.general() as u8,
        model.fixed_bitmap(),
        model.width().bits() as u8,
    ]);
}

fn read_model(reader: &mut Reader<'_>) -> Result<PmuModel, VpmuStateError> {
    const BAD: VpmuStateError = VpmuStateError::Impossible("there is no such model");
    let (kind, version) = (reader.u8()?, reader.u8()?);
    let has_branches = kind & KIND_WITH_BRANCHES != 0;
    let kind = kind & !KIND_WITH_BRANCHES;
    let generation = match (kind, version) {
        (0, 1) => PmuGeneration::Off(Vendor::Intel),
        (0, 2) => PmuGeneration::Off(Vendor::Amd),
        (1 | 5, 1..=5) => PmuGeneration::Intel(version),
        (2, 0) => PmuGeneration::AmdK7,
        (3, 0) => PmuGeneration::AmdCore,
        (4, 0) => PmuGeneration::AmdV2,
        _ => return Err(BAD),
    };
    let general = u32::from(reader.u8()?);
    let fixed_bitmap = reader.u8()?;
    let width = u32::from(reader.u8()?);
    PmuModel::new(
        generation,
        Some(RequestedCounters {
            general,
            fixed: Some(0),
        }),
        Some(width),
    )
    .ok()
    .and_then(|model| model.with_fixed_bitmap(fixed_bitmap))
    .map(|model| {
        if kind == 5 {
            model.with_transactions()
        } else {
            model
        }
    })
    .map(|model| {
        if has_branches {
            model.with_branch_records()
        } else {
            model
        }
    })
    .filter(|model| model.has_branch_records() == has_branches)
    .ok_or(BAD)
}

/// Recomputes the checksum of a saved state. Used by fuzz targets, whose modified states must pass
/// the checksum check.
#[doc(hidden)]
pub fn fix_checksum(bytes: &mut [u8]) {
    if let Some(end) = bytes.len().checked_sub(CRC_BYTES) {
        let crc = crc32(&bytes[..end]).to_le_bytes();
        bytes[end..].copy_from_slice(&crc);
    }
}

/// Computes the CRC-32 of Ethernet and zip (polynomial 0xEDB88320, reflected).
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::MsrAddress;
    use crate::registers::*;
    use crate::share::PmiShare;
    use crate::sim::SimCounterEvents;
    use crate::vpmu::{MsrReadOutcome, MsrWriteOutcome};

    /// Size of the PMI handler measurement in a saved state, in bytes.
    const HANDLER_BYTES: usize = 1 + 4 * 8;

    fn idle() -> (Vpmu, SimCounterEvents) {
        (Vpmu::new(PmuModel::INTEL), SimCounterEvents::default())
    }

    fn busy() -> (Vpmu, SimCounterEvents) {
        let (mut vpmu, mut events) = idle();
        for (msr, value) in [
            (IA32_PERFEVTSEL0, 0x43_00C0u64),
            (IA32_PMC0, 1000),
            (IA32_FIXED_CTR_CTRL, 0x0B0),
            (IA32_FIXED_CTR0 + 1, (1 << 48) - 10),
            (IA32_PERF_GLOBAL_CTRL, 0x2_0000_0001),
        ] {
            let written = vpmu.write_msr(MsrAddress(msr), value, &mut events);
            assert_eq!(written, MsrWriteOutcome::Done);
        }
        vpmu.reconcile(&mut events);
        (vpmu, events)
    }

    #[test]
    fn checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn saved_state_includes_folded_counters_and_due_pmi() {
        let (mut vpmu, mut events) = busy();
        events.run(10);
        let bytes = vpmu.save(&mut events);
        let (mut there, mut there_events) = idle();
        there.restore(&bytes, &mut there_events).unwrap();
        assert!(there.pmi_pending());
        there.reconcile(&mut there_events);
        there_events.run(5);
        for (msr, value) in [
            (IA32_PMC0, 1015),
            (IA32_FIXED_CTR0 + 1, 5),
            (IA32_PERF_GLOBAL_STATUS, 1 << 33),
        ] {
            let read = there.read_msr(MsrAddress(msr), &mut there_events);
            assert_eq!(read, MsrReadOutcome::Value(value));
        }
    }

    /// A saved state can be restored into a PMU for which no events exist yet.
    #[test]
    fn state_is_restored_before_events_exist() {
        let (mut vpmu, mut events) = busy();
        events.run(10);
        let bytes = vpmu.save(&mut events);
        let (mut there, mut there_events) = idle();
        there.restore_before_use(&bytes).unwrap();
        assert!(there.pmi_pending());
        there.reconcile(&mut there_events);
        there_events.run(5);
        let read = there.read_msr(MsrAddress(IA32_PMC0), &mut there_events);
        assert_eq!(read, MsrReadOutcome::Value(1015));
    }

    #[test]
    fn damaged_state_is_rejected_without_changes() {
        let (mut vpmu, mut events) = busy();
        let bytes = vpmu.save(&mut events);
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] ^= 0x10;
            assert!(vpmu.restore(&damaged, &mut events).is_err(), "byte {i}");
            assert!(vpmu.restore(&bytes[..i], &mut events).is_err(), "cut at {i}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(
            vpmu.restore(&longer, &mut events),
            Err(VpmuStateError::Length { .. })
        ));
        assert_eq!(vpmu.save(&mut events), bytes);
    }

    /// Recomputes the checksum of a modified state. The state then passes the checksum check, and
    /// the later checks are tested.
    fn reframe(mut bytes: Vec<u8>) -> Vec<u8> {
        fix_checksum(&mut bytes);
        bytes
    }

    #[test]
    fn unreachable_states_are_rejected() {
        let (mut vpmu, mut events) = busy();
        let bytes = vpmu.save(&mut events);
        const MODEL: usize = HEADER_BYTES;
        for (at, what) in [
            (MODEL, "there is no such model"),
            (MODEL + 12, "the fixed counters' control has reserved bits"),
            (MODEL + 20, "the global control has reserved bits"),
            (MODEL + 27, "the global status has reserved bits"),
            (MODEL + 35, "the debug control has reserved bits"),
            (MODEL + 37, "the PMI is neither due nor not due"),
            (MODEL + 38, "a counter that does not exist requested the PMI"),
            (MODEL + 46, "the PMI handler is in no known phase"),
            (
                MODEL + 47,
                "the PMI handler has to serve a counter that does not exist",
            ),
            (MODEL + 80, "a counter is there twice or does not exist"),
            (MODEL + 88, "a selector has reserved bits"),
            (MODEL + 96, "a counter is wider than its width"),
        ] {
            let mut changed = bytes.clone();
            changed[at] = 0x55;
            let error = vpmu.restore(&reframe(changed), &mut events).unwrap_err();
            assert_eq!(error, VpmuStateError::Impossible(what));
        }
        let mut newer = bytes.clone();
        newer[5] = 9;
        assert_eq!(
            vpmu.restore(&reframe(newer), &mut events),
            Err(VpmuStateError::Version { have: 9, known: 4 })
        );
    }

    #[test]
    fn contradictory_pmi_is_rejected() {
        const PMI: usize = HEADER_BYTES + 5 + 32;
        let (mut vpmu, mut events) = busy();
        let bytes = vpmu.save(&mut events);
        for (due, sources, what) in [
            (PMI_NONE, 1, "counters requested a PMI that is not due"),
            (PMI_DEFERRED, 0, "no counter requested the deferred PMI"),
            (3, 1, "the PMI is neither due nor not due"),
        ] {
            let mut changed = bytes.clone();
            (changed[PMI], changed[PMI + 1]) = (due, sources);
            let error = vpmu.restore(&reframe(changed), &mut events).unwrap_err();
            assert_eq!(error, VpmuStateError::Impossible(what));
        }
    }

    /// Sets the version of a saved state whose body was changed to match `version`, and corrects
    /// its length and checksum.
    fn as_version(version: u8, mut bytes: Vec<u8>) -> Vec<u8> {
        let body = u32::try_from(bytes.len() - HEADER_BYTES - CRC_BYTES).unwrap();
        bytes[5] = version;
        bytes[7..11].copy_from_slice(&body.to_le_bytes());
        reframe(bytes)
    }

    #[test]
    fn layout_version_2_is_still_read() {
        const HANDLER: usize = HEADER_BYTES + 5 + 41;
        let (mut vpmu, mut events) = busy();
        vpmu.set_pmi_share(PmiShare::from_percent(50).unwrap());
        events.run(10);
        // Reading the status detects the overflow.
        vpmu.read_msr(MsrAddress(IA32_PERF_GLOBAL_STATUS), &mut events);
        vpmu.pmi_delivered(events.now_ns());
        let bytes = vpmu.save(&mut events);
        assert_eq!(bytes[HANDLER], HANDLER_RUNNING);
        let mut old = bytes.clone();
        old.drain(HANDLER..HANDLER + HANDLER_BYTES);
        vpmu.restore(&as_version(2, old), &mut events).unwrap();
        let mut expected = bytes;
        expected[HANDLER..HANDLER + HANDLER_BYTES].fill(0);
        assert_eq!(vpmu.save(&mut events), reframe(expected));
    }

    /// Layout version 1 does not contain the counters that requested the PMI, so every possible
    /// counter is assumed to have requested it.
    #[test]
    fn layout_version_1_is_still_read() {
        const PMI: usize = HEADER_BYTES + 5 + 32;
        let (mut vpmu, mut events) = busy();
        events.run(10);
        let bytes = vpmu.save(&mut events);
        let mut old = bytes.clone();
        old.drain(PMI + 1..PMI + 9 + HANDLER_BYTES);
        let old = as_version(1, old);
        let (mut there, mut there_events) = idle();
        there.restore(&old, &mut there_events).unwrap();
        assert!(there.pmi_pending());
        // A PMU restored from layout version 1 is saved in the current layout version.
        assert_eq!(there.save(&mut there_events), bytes);
        let mut deferred = old;
        deferred[PMI] = PMI_DEFERRED;
        assert_eq!(
            there.restore(&reframe(deferred), &mut there_events),
            Err(VpmuStateError::Impossible("the PMI is neither due nor not due"))
        );
    }

    #[test]
    fn state_of_other_model_is_rejected_by_name() {
        let (mut vpmu, mut events) = busy();
        let bytes = vpmu.save(&mut events);
        let error = Vpmu::new(PmuModel::AMD).restore(&bytes, &mut events);
        assert_eq!(
            error.unwrap_err().to_string(),
            "the saved state is for a PMU intel-v2 with 4+3 counters of 48 bits, but this one is amd with 6 counters of 48 bits; start the VM with the same --pmu options"
        );
    }
}
