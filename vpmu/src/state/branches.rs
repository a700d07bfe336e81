//! Saves and restores the branch records and their control registers.

use super::reader::Reader;
use super::{VERSION_WITH_BRANCHES, VpmuStateError};
use crate::branches::{BranchControls, BranchRecords, BranchRegister};
use crate::model::PmuModel;
use crate::registers;
use crate::vendor::{PmuRegisters, RegisterWriteEffect};
use crate::vpmu::Vpmu;

impl Vpmu {
    /// Appends the branch records and their control registers, if the model has them. The progress
    /// of a collection is not saved.
    pub(super) fn write_branches(&self, body: &mut Vec<u8>) {
        let Some(branches) = &self.branches else { return };
        let controls = &self.registers.branches;
        for field in [controls.control, controls.filter, controls.depth, controls.top] {
            body.extend(field.to_le_bytes());
        }
        for record in &branches.records[..controls.records()] {
            for field in [record.from, record.to, record.info] {
                body.extend(field.to_le_bytes());
            }
        }
    }
}

/// Reads the branch records and their control registers from a body with layout `version`.
pub(super) fn read_branches(
    reader: &mut Reader<'_>,
    model: &PmuModel,
    version: u16,
    registers: &mut PmuRegisters,
) -> Result<Option<Box<BranchRecords>>, VpmuStateError> {
    if (version >= VERSION_WITH_BRANCHES) != model.has_branch_records() {
        return Err(VpmuStateError::Impossible(
            "its layout version is not that of a model with these branch records",
        ));
    }
    if !model.has_branch_records() {
        return Ok(None);
    }
    let ops = registers::of(model.vendor());
    let mut at_reset = ops.at_reset(model).branches;
    // A register that the vendor lacks keeps its initial value.
    let mut checked = |register, value| {
        let initial = at_reset.register(register).map_or(0, |initial| *initial);
        if value == initial || ops.write_branch_register(register, value) == RegisterWriteEffect::Store(value)
        {
            Ok(value)
        } else {
            Err(VpmuStateError::Impossible("a branch record has reserved bits"))
        }
    };
    registers.branches = BranchControls {
        control: checked(BranchRegister::Control, reader.u64()?)?,
        filter: checked(BranchRegister::Filter, reader.u64()?)?,
        depth: checked(BranchRegister::Depth, reader.u64()?)?,
        top: checked(BranchRegister::Top, reader.u64()?)?,
    };
    let mut branches = Box::<BranchRecords>::default();
    for (record, n) in branches
        .records
        .iter_mut()
        .zip(0..)
        .take(registers.branches.records())
    {
        record.from = checked(BranchRegister::From(n), reader.u64()?)?;
        record.to = checked(BranchRegister::To(n), reader.u64()?)?;
        record.info = checked(BranchRegister::Info(n), reader.u64()?)?;
    }
    Ok(Some(branches))
}
