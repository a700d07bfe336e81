//! ORC unwind tables of a vmlinux.
//!
//! `.orc_unwind_ip` contains sorted addresses (32-bit, relative to each slot's own address).
//! `.orc_unwind` contains one 6-byte entry per address: the previous stack pointer (a register and
//! an offset), the location of the caller's saved frame pointer, and the contents of the top of the
//! frame. The layout of the entry's last 16 bits has changed twice (Linux
//! `arch/x86/include/asm/orc_types.h`):
//!
//! | kernels | bits 0-3 | 4-7 | 8 up |
//! |---|---|---|---|
//! | to 6.2 | sp_reg | bp_reg | type:2, end:1 |
//! | 6.3 | sp_reg | bp_reg | type:2, signal:1, end:1 |
//! | from 6.4 | sp_reg | bp_reg | type:3 (0 undefined, 1 end, 2 call, 3 regs, 4 partial), signal:1 |
//!
//! The older tables do not identify their layout. The layout is detected from the entries, nearly
//! all of which are calls. The type of a call is 0 in the old layouts and 2 in the new one.

/// Base register of an ORC entry (numbers from `orc_types.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the registers' names")]
pub enum OrcRegister {
    Undefined,
    PrevSp,
    Dx,
    Di,
    Bp,
    Sp,
    R10,
    R13,
    /// The base is the value in memory at rbp plus the entry's offset.
    BpIndirect,
    /// The base is the value in memory at rsp, to which the entry's offset is added.
    SpIndirect,
}

impl OrcRegister {
    fn from_nibble(n: u16) -> Option<Self> {
        Some(match n {
            0 => Self::Undefined,
            1 => Self::PrevSp,
            2 => Self::Dx,
            3 => Self::Di,
            4 => Self::Bp,
            5 => Self::Sp,
            6 => Self::R10,
            7 => Self::R13,
            8 => Self::BpIndirect,
            9 => Self::SpIndirect,
            _ => return None,
        })
    }
}

/// Type of the data at the top of a stack frame, from which the unwinder finds the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrcFrameKind {
    /// Unknown data. The unwinder cannot unwind the code at this address.
    Undefined,
    /// There is no caller: this frame is the outermost one of the stack.
    End,
    /// Return address of a call.
    Call,
    /// Complete `struct pt_regs`, in which the kernel has saved all registers.
    Regs,
    /// Partial `struct pt_regs` that the CPU pushes for an exception: ip, cs, flags, sp, ss.
    RegsPartial,
}

/// Decoded ORC entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrcEntry {
    /// Offset from the register in `sp_reg` to the previous stack pointer.
    pub sp_offset: i16,
    /// Offset from the register in `bp_reg` to the location of the saved frame pointer.
    pub bp_offset: i16,
    /// Register from which the previous stack pointer is computed.
    pub sp_reg: OrcRegister,
    /// Register from which the location of the saved frame pointer is computed: `PrevSp` or `Bp`.
    /// `Undefined` if the frame pointer has not been saved and is still in rbp.
    pub bp_reg: OrcRegister,
    /// Type of the data at the top of the stack frame.
    pub kind: OrcFrameKind,
}

/// Layout of the type and flag bits in ORC entries, which depends on the kernel version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrcFormat {
    /// Entry layout of Linux 4.14 to 6.2.
    V4_14,
    /// Entry layout of Linux 6.3.
    V6_3,
    /// Entry layout of Linux 6.4 and later.
    V6_4,
}

/// Error returned for unusable ORC tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrcError {
    /// Different numbers of slots in the two sections.
    #[error("the ORC sections disagree: {ips} addresses, {entries} entries")]
    Sizes {
        /// Number of slots in `.orc_unwind_ip`.
        ips: usize,
        /// Number of slots in `.orc_unwind`.
        entries: usize,
    },
    /// Tables without entries.
    #[error("the ORC tables are empty")]
    Empty,
    /// Addresses that span more than 4 GiB, unlike those of any kernel.
    #[error("the ORC tables cover more than 4 GiB")]
    Span,
    /// Offsets, received from another process, that do not ascend from 0.
    #[error("the ORC tables are not sorted")]
    Order,
}

const IP_SIZE: usize = 4;
/// Size of an ORC entry, in bytes.
pub const ENTRY_SIZE: usize = 6;
/// Binary logarithm of the block size. Each slot of the block index covers a block of 256 bytes of
/// text, as in the kernel.
const BLOCK_SHIFT: u32 = 8;
/// Maximum number of slots in the block index per table entry. Real kernels have more entries than
/// blocks. Without a limit, a table with a few entries scattered over 4 GiB would need an index of
/// 64 MiB.
const BLOCKS_PER_ENTRY: u64 = 4;

/// Returns the sorted addresses of an `.orc_unwind_ip` section at `virt`. Each entry is the signed
/// 32-bit distance from the entry itself to an instruction.
pub fn addresses(virt: u64, data: &[u8]) -> Vec<u64> {
    let mut ips: Vec<u64> = slots(virt, data).collect();
    ips.sort_unstable();
    ips.dedup();
    ips
}

/// Returns an iterator over the addresses of an `.orc_unwind_ip` section at `virt`, in the order of
/// its entries.
fn slots(virt: u64, data: &[u8]) -> impl Iterator<Item = u64> {
    let (distances, _) = data.as_chunks::<IP_SIZE>();
    distances.iter().enumerate().map(move |(i, distance)| {
        let slot = virt.wrapping_add((i * IP_SIZE) as u64);
        slot.wrapping_add_signed(i64::from(i32::from_le_bytes(*distance)))
    })
}

/// ORC tables of one kernel, with link-time addresses.
#[derive(Debug)]
pub struct OrcTable {
    base: u64,
    format: OrcFormat,
    /// Offset of each entry's address from `base`, in ascending order.
    offsets: Vec<u32>,
    raw: Vec<[u8; ENTRY_SIZE]>,
    /// Block index: for each block of text, the index in `offsets` of the first entry at or after
    /// the start of the block.
    blocks: Vec<u32>,
    /// Binary logarithm of the size of a block, which covers `2^block_shift` bytes of text.
    block_shift: u32,
}

impl OrcTable {
    /// Parses the contents of the sections `.orc_unwind_ip` and `.orc_unwind`. `ip_section_address`
    /// is the link-time address of `.orc_unwind_ip`.
    #[expect(clippy::cast_possible_truncation, reason = "the span was checked to fit")]
    pub fn parse(ip_section: &[u8], ip_section_address: u64, entries: &[u8]) -> Result<Self, OrcError> {
        let n = ip_section.len() / IP_SIZE;
        if n != entries.len() / ENTRY_SIZE {
            return Err(OrcError::Sizes {
                ips: n,
                entries: entries.len() / ENTRY_SIZE,
            });
        }
        if n == 0 {
            return Err(OrcError::Empty);
        }
        let (entries, _) = entries.as_chunks::<ENTRY_SIZE>();
        let ips = slots(ip_section_address, ip_section);
        let mut slots: Vec<(u64, [u8; ENTRY_SIZE])> = ips.zip(entries.iter().copied()).collect();
        // The tables of kernels since 5.6 are sorted at build time, those of older kernels at boot.
        // The sort is stable. If two entries have the same address, the later one takes precedence
        // below, as in the kernel.
        if !slots.is_sorted_by_key(|s| s.0) {
            slots.sort_by_key(|s| s.0);
        }
        let base = slots[0].0;
        let span = slots[n - 1].0 - base;
        if u32::try_from(span).is_err() {
            return Err(OrcError::Span);
        }
        let offsets = slots.iter().map(|s| (s.0 - base) as u32).collect();
        Ok(Self::indexed(
            base,
            offsets,
            slots.into_iter().map(|s| s.1).collect(),
        ))
    }

    /// Rebuilds a table that was received from another process as [`Self::base`], [`Self::offsets`]
    /// and [`Self::entries`].
    ///
    /// # Errors
    /// Returns an [`OrcError`] if [`Self::parse`] could not have produced this table.
    pub fn from_parts(
        base: u64,
        offsets: Vec<u32>,
        entries: Vec<[u8; ENTRY_SIZE]>,
    ) -> Result<Self, OrcError> {
        if offsets.len() != entries.len() {
            return Err(OrcError::Sizes {
                ips: offsets.len(),
                entries: entries.len(),
            });
        }
        match offsets.first() {
            None => Err(OrcError::Empty),
            Some(0) if offsets.is_sorted() => Ok(Self::indexed(base, offsets, entries)),
            Some(_) => Err(OrcError::Order),
        }
    }

    /// Builds a table and its block index from the entries `raw` and their offsets from `base`.
    /// There must be one offset per entry, and the offsets must ascend from 0.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "there are fewer entries than 2^32"
    )]
    fn indexed(base: u64, offsets: Vec<u32>, raw: Vec<[u8; ENTRY_SIZE]>) -> Self {
        let format = detect(raw.iter().map(flags));
        let (n, span) = (offsets.len(), u64::from(offsets.last().copied().unwrap_or(0)));
        let mut block_shift = BLOCK_SHIFT;
        while span >> block_shift > BLOCKS_PER_ENTRY * n as u64 {
            block_shift += 1;
        }
        let mut blocks = vec![0u32; (span >> block_shift) as usize + 2];
        let mut slot = 0;
        for (block, first) in blocks.iter_mut().enumerate() {
            let start = (block as u64) << block_shift;
            while slot < n && u64::from(offsets[slot]) < start {
                slot += 1;
            }
            *first = slot as u32;
        }
        Self {
            base,
            format,
            offsets,
            raw,
            blocks,
            block_shift,
        }
    }

    /// Returns the link-time address to which the first entry applies, from which all offsets are
    /// counted.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the offset of each entry's address from [`Self::base`], in ascending order.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Returns the encoded entries of the table, in ascending order of address.
    pub fn entries(&self) -> &[[u8; ENTRY_SIZE]] {
        &self.raw
    }

    /// Returns the entry layout that was detected in the table.
    pub fn format(&self) -> OrcFormat {
        self.format
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Returns `false`, because empty tables cannot be created.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Returns the entry that applies to the link-time address `ip`, or `None` if `ip` is outside
    /// the table or the entry is invalid.
    pub fn find(&self, ip: u64) -> Option<OrcEntry> {
        let offset = u32::try_from(ip.checked_sub(self.base)?).ok()?;
        let block = (offset >> self.block_shift) as usize;
        let (from, to) = (
            *self.blocks.get(block)? as usize,
            *self.blocks.get(block + 1)? as usize,
        );
        let after = from + self.offsets[from..to].partition_point(|&o| o <= offset);
        decode(self.format, self.raw.get(after.checked_sub(1)?)?)
    }
}

fn flags(raw: &[u8; ENTRY_SIZE]) -> u16 {
    u16::from_le_bytes([raw[4], raw[5]])
}

fn detect(all: impl Iterator<Item = u16>) -> OrcFormat {
    let (mut zero, mut two, mut bit3) = (0u64, 0u64, 0u64);
    for f in all {
        // Nearly all entries that derive the previous stack pointer from rsp or rbp have the type
        // call.
        if matches!(
            OrcRegister::from_nibble(f & 15),
            Some(OrcRegister::Sp | OrcRegister::Bp)
        ) {
            match (f >> 8) & 7 {
                0 => zero += 1,
                2 => two += 1,
                _ => {}
            }
        }
        bit3 += u64::from(f & (1 << 11) != 0);
    }
    if two > zero {
        OrcFormat::V6_4
    } else if bit3 > 0 {
        OrcFormat::V6_3
    } else {
        OrcFormat::V4_14
    }
}

fn decode(format: OrcFormat, raw: &[u8; ENTRY_SIZE]) -> Option<OrcEntry> {
    let f = flags(raw);
    let sp_reg = OrcRegister::from_nibble(f & 15)?;
    let bp_reg = OrcRegister::from_nibble((f >> 4) & 15)?;
    let old = |end: bool| match ((f >> 8) & 3, sp_reg) {
        // In the old layouts, an undefined stack pointer means that unwinding stops, and the end
        // bit indicates the reason.
        (_, OrcRegister::Undefined) if end => Some(OrcFrameKind::End),
        (_, OrcRegister::Undefined) => Some(OrcFrameKind::Undefined),
        (0, _) => Some(OrcFrameKind::Call),
        (1, _) => Some(OrcFrameKind::Regs),
        (2, _) => Some(OrcFrameKind::RegsPartial),
        _ => None,
    };
    let kind = match format {
        OrcFormat::V4_14 => old(f & (1 << 10) != 0)?,
        OrcFormat::V6_3 => old(f & (1 << 11) != 0)?,
        OrcFormat::V6_4 => match (f >> 8) & 7 {
            0 => OrcFrameKind::Undefined,
            1 => OrcFrameKind::End,
            2 => OrcFrameKind::Call,
            3 => OrcFrameKind::Regs,
            4 => OrcFrameKind::RegsPartial,
            _ => return None,
        },
    };
    let half = |at: usize| i16::from_le_bytes([raw[at], raw[at + 1]]);
    Some(OrcEntry {
        sp_offset: half(0),
        bp_offset: half(2),
        sp_reg,
        bp_reg,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns the contents of the sections `.orc_unwind_ip` (at address `at`) and `.orc_unwind`
    /// for rows of (address, sp_offset, bp_offset, flags).
    fn sections(at: u64, rows: &[(u64, i16, i16, u16)]) -> (Vec<u8>, Vec<u8>) {
        let (mut ips, mut entries) = (Vec::new(), Vec::new());
        for (i, &(ip, sp, bp, f)) in rows.iter().enumerate() {
            let slot = at + 4 * i as u64;
            ips.extend_from_slice(&(ip.wrapping_sub(slot) as i32).to_le_bytes());
            entries.extend_from_slice(&sp.to_le_bytes());
            entries.extend_from_slice(&bp.to_le_bytes());
            entries.extend_from_slice(&f.to_le_bytes());
        }
        (ips, entries)
    }

    const AT: u64 = 0xffff_ffff_8200_0000;
    const TEXT: u64 = 0xffff_ffff_8100_0000;

    #[test]
    fn orc_layouts_are_detected_and_decoded() {
        // sp_reg 5 (rsp) and bp_reg 1 (previous sp), followed by a pt_regs, a partial pt_regs and
        // an end entry.
        let rows = |call: u16, regs: u16, partial: u16, end: u16| {
            let (i, e) = sections(
                AT,
                &[
                    (TEXT, 8, 0, 5 | call),
                    (TEXT + 0x10, 16, -16, 0x15 | call),
                    (TEXT + 0x20, 24, -16, 0x15 | call),
                    (TEXT + 0x400, 0, 0, 5 | regs),
                    (TEXT + 0x410, 0, 0, 5 | partial),
                    (TEXT + 0x420, 0, 0, end),
                ],
            );
            OrcTable::parse(&i, AT, &e).unwrap()
        };
        for (table, format) in [
            (rows(0, 0x100, 0x200, 0x400), OrcFormat::V4_14),
            (rows(0, 0x500, 0x600, 0x800), OrcFormat::V6_3),
            (rows(0x200, 0xB00, 0xC00, 0x100), OrcFormat::V6_4),
        ] {
            assert_eq!(table.format(), format);
            let kind = |off| table.find(TEXT + off).unwrap().kind;
            assert_eq!(kind(0), OrcFrameKind::Call);
            let e = table.find(TEXT + 0x1f).unwrap();
            assert_eq!(
                (e.sp_offset, e.bp_offset, e.sp_reg, e.bp_reg),
                (16, -16, OrcRegister::Sp, OrcRegister::PrevSp)
            );
            // An address without an entry belongs to the nearest lower entry, even if blocks
            // between them are empty.
            assert_eq!(table.find(TEXT + 0x3ff).unwrap().sp_offset, 24);
            assert_eq!(kind(0x405), OrcFrameKind::Regs);
            assert_eq!(kind(0x410), OrcFrameKind::RegsPartial);
            assert_eq!(kind(0x420), OrcFrameKind::End);
            assert_eq!(table.find(TEXT - 1), None);
            assert_eq!(table.find(TEXT + 0x10_0000), None);
        }
    }

    /// A valid table that was received from another process is rebuilt from its parts, and invalid
    /// parts are rejected.
    #[test]
    fn orc_table_is_rebuilt_from_parts() {
        let rows = [
            (TEXT, 8, 0, 0x205),
            (TEXT + 0x10, 16, -16, 0x215),
            (TEXT + 0x4000, 0, 0, 0x100),
        ];
        let (i, e) = sections(AT, &rows);
        let table = OrcTable::parse(&i, AT, &e).unwrap();
        let (offsets, entries) = (table.offsets().to_vec(), table.entries().to_vec());
        let again = OrcTable::from_parts(table.base(), offsets.clone(), entries.clone()).unwrap();
        for at in [
            TEXT - 1,
            TEXT,
            TEXT + 0x11,
            TEXT + 0x3fff,
            TEXT + 0x4000,
            u64::MAX,
        ] {
            assert_eq!(again.find(at), table.find(at), "{at:#x}");
        }
        assert_eq!(again.format(), table.format());
        let wrong = |offsets: &[u32], n: usize| {
            OrcTable::from_parts(TEXT, offsets.to_vec(), entries[..n].to_vec()).unwrap_err()
        };
        assert_eq!(wrong(&offsets, 2), OrcError::Sizes { ips: 3, entries: 2 });
        assert_eq!(wrong(&[], 0), OrcError::Empty);
        assert_eq!(wrong(&[0, 9, 8], 3), OrcError::Order);
        assert_eq!(wrong(&[1, 8, 9], 3), OrcError::Order);
        // The table may be at any address, including the end of the address space.
        let top = OrcTable::from_parts(u64::MAX, vec![0, 1, u32::MAX], entries.clone()).unwrap();
        assert!(top.find(u64::MAX).is_some() && top.find(0).is_none());
    }

    #[test]
    fn orc_sorts_unsorted_table() {
        let (i, e) = sections(AT, &[(TEXT + 0x100, 16, 0, 5), (TEXT, 8, 0, 5)]);
        let table = OrcTable::parse(&i, AT, &e).unwrap();
        assert_eq!(table.find(TEXT + 1).unwrap().sp_offset, 8);
        assert_eq!(table.find(TEXT + 0x100).unwrap().sp_offset, 16);
    }

    #[test]
    fn orc_rejects_mismatched_sections() {
        assert_eq!(
            OrcTable::parse(&[0; 8], AT, &[0; 6]).unwrap_err(),
            OrcError::Sizes { ips: 2, entries: 1 }
        );
        assert_eq!(OrcTable::parse(&[], AT, &[]).unwrap_err(), OrcError::Empty);
    }

    proptest! {
        #[test]
        fn arbitrary_sections_never_panic(ips in proptest::collection::vec(any::<u8>(), 0..400),
                                          entries in proptest::collection::vec(any::<u8>(), 0..600),
                                          at: u64, probe: u64) {
            if let Ok(table) = OrcTable::parse(&ips, at, &entries) {
                let _ = table.find(probe);
                for i in 0..table.len() {
                    let _ = table.find(table.base + u64::from(table.offsets[i]));
                }
            }
        }

        #[test]
        fn lookup_agrees_with_a_plain_search(mut offs in proptest::collection::vec(0u64..4000, 1..60), probe in 0u64..4200) {
            offs.sort_unstable();
            offs.dedup();
            let rows: Vec<_> = offs.iter().enumerate().map(|(i, &o)| (TEXT + o, i as i16, 0, 5)).collect();
            let (i, e) = sections(AT, &rows);
            let table = OrcTable::parse(&i, AT, &e).unwrap();
            let want = offs.iter().rposition(|&o| o <= probe).map(|i| i as i16);
            let got = table.find(TEXT + probe).map(|e| e.sp_offset);
            // The table does not cover addresses after its last block.
            if got.is_some() || probe <= *offs.last().unwrap() {
                prop_assert_eq!(got, want);
            }
        }
    }
}
