//! ORC: the kernel's own unwind tables, as vmlinux carries them.
//!
//! `.orc_unwind_ip` holds sorted addresses (32-bit, relative to each slot's own address) and `.orc_unwind`
//! one 6-byte entry for each: how to find the previous stack pointer (a register and an offset), where the
//! caller's frame pointer was saved, and what lies at the top of the frame. The layout of the entry's last
//! 16 bits changed twice (Linux `arch/x86/include/asm/orc_types.h`):
//!
//! | kernels | bits 0-3 | 4-7 | 8 up |
//! |---|---|---|---|
//! | to 6.2 | sp_reg | bp_reg | type:2, end:1 |
//! | 6.3 | sp_reg | bp_reg | type:2, signal:1, end:1 |
//! | from 6.4 | sp_reg | bp_reg | type:3 (0 undefined, 1 end, 2 call, 3 regs, 4 partial), signal:1 |
//!
//! Nothing in the older tables names their layout, so it is told from the entries: nearly all are calls,
//! whose type is 0 in the old layouts and 2 in the new one.

/// A register an entry may be based on (the numbers of `orc_types.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the registers' names")]
pub enum Reg {
    Undefined,
    PrevSp,
    Dx,
    Di,
    Bp,
    Sp,
    R10,
    R13,
    /// Memory at rbp + offset.
    BpIndirect,
    /// Memory at rsp, then the offset is added.
    SpIndirect,
}

impl Reg {
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

/// What lies at the top of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing is known about this address.
    Undefined,
    /// The outermost frame of a stack.
    End,
    /// A return address.
    Call,
    /// A whole `struct pt_regs`.
    Regs,
    /// Only what the CPU pushes for an exception: ip, cs, flags, sp, ss.
    RegsPartial,
}

/// One decoded entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrcEntry {
    /// Added to the register in `sp_reg` for the previous stack pointer.
    pub sp_offset: i16,
    /// Added to the base in `bp_reg` for the place of the saved frame pointer.
    pub bp_offset: i16,
    /// Base of the previous stack pointer.
    pub sp_reg: Reg,
    /// Base of the saved frame pointer: `PrevSp`, `Bp`, or `Undefined` when it is still in the register.
    pub bp_reg: Reg,
    /// What lies at the top.
    pub kind: Kind,
}

/// The layout of the entries' flag bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrcFormat {
    /// Linux 4.14 to 6.2.
    V4_14,
    /// Linux 6.3.
    V6_3,
    /// Linux 6.4 and later.
    V6_4,
}

/// Why tables cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrcError {
    /// The sections' sizes do not belong together.
    #[error("the ORC sections disagree: {ips} addresses, {entries} entries")]
    Sizes {
        /// Slots in `.orc_unwind_ip`.
        ips: usize,
        /// Slots in `.orc_unwind`.
        entries: usize,
    },
    /// No entries.
    #[error("the ORC tables are empty")]
    Empty,
    /// The addresses span more than 4 GiB, which no kernel does.
    #[error("the ORC tables cover more than 4 GiB")]
    Span,
    /// Those that came from another process do not ascend from 0.
    #[error("the ORC tables are not in order")]
    Order,
}

const IP_SIZE: usize = 4;
/// Bytes of an entry.
pub const ENTRY_SIZE: usize = 6;
/// One slot of the block index covers 256 bytes of text, like the kernel's own.
const BLOCK_SHIFT: u32 = 8;
/// Most slots of the block index for each entry. A kernel has more entries than blocks; a few entries that
/// somebody strewed over 4 GiB are not to cost 64 MiB.
const BLOCKS_PER_ENTRY: u64 = 4;

/// The addresses an `.orc_unwind_ip` section at `virt` describes: each entry is the distance from
/// itself to an instruction, as a signed 32-bit number.
pub fn addresses(virt: u64, data: &[u8]) -> Vec<u64> {
    let mut ips: Vec<u64> = slots(virt, data).collect();
    ips.sort_unstable();
    ips.dedup();
    ips
}

/// The addresses of the slots of an `.orc_unwind_ip` section at `virt`, in their order.
fn slots(virt: u64, data: &[u8]) -> impl Iterator<Item = u64> {
    let (distances, _) = data.as_chunks::<IP_SIZE>();
    distances.iter().enumerate().map(move |(i, distance)| {
        let slot = virt.wrapping_add((i * IP_SIZE) as u64);
        slot.wrapping_add_signed(i64::from(i32::from_le_bytes(*distance)))
    })
}

/// The tables of one kernel, in link-time addresses.
#[derive(Debug)]
pub struct OrcTable {
    base: u64,
    format: OrcFormat,
    /// Offsets from `base`, ascending.
    offsets: Vec<u32>,
    raw: Vec<[u8; ENTRY_SIZE]>,
    /// For each block of text, the first slot of `offsets` at or above the block's start.
    blocks: Vec<u32>,
    /// A block is `2^block_shift` bytes of text.
    block_shift: u32,
}

impl OrcTable {
    /// Reads the sections' bytes. `ip_section_address` is the link-time address of `.orc_unwind_ip`.
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
        // Sorted at the kernel's build since 5.6; at its boot before that. Stable: of two entries for one
        // address the later one wins below, as it does in the kernel.
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

    /// A table of another process, by what it was sent as: [`Self::base`], [`Self::offsets`] and
    /// [`Self::entries`].
    ///
    /// # Errors
    /// [`OrcError`]: it is none that [`Self::parse`] makes.
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

    /// Of as many entries as offsets, which ascend from 0.
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

    /// The first address that there is an entry for.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// How far each entry's address is from the first, ascending.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The entries as the kernel has them, in that order.
    pub fn entries(&self) -> &[[u8; ENTRY_SIZE]] {
        &self.raw
    }

    /// The layout that was recognised.
    pub fn format(&self) -> OrcFormat {
        self.format
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Never true: an empty table is not made.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// The entry in force at link-time address `ip`; `None` outside the table or for an entry that makes no
    /// sense.
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
        // Entries that find the previous stack from rsp or rbp are calls with few exceptions.
        if matches!(Reg::from_nibble(f & 15), Some(Reg::Sp | Reg::Bp)) {
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
    let sp_reg = Reg::from_nibble(f & 15)?;
    let bp_reg = Reg::from_nibble((f >> 4) & 15)?;
    let old = |end: bool| match ((f >> 8) & 3, sp_reg) {
        // In the old layouts "no stack pointer" says that there is nothing to unwind, and the end bit why.
        (_, Reg::Undefined) if end => Some(Kind::End),
        (_, Reg::Undefined) => Some(Kind::Undefined),
        (0, _) => Some(Kind::Call),
        (1, _) => Some(Kind::Regs),
        (2, _) => Some(Kind::RegsPartial),
        _ => None,
    };
    let kind = match format {
        OrcFormat::V4_14 => old(f & (1 << 10) != 0)?,
        OrcFormat::V6_3 => old(f & (1 << 11) != 0)?,
        OrcFormat::V6_4 => match (f >> 8) & 7 {
            0 => Kind::Undefined,
            1 => Kind::End,
            2 => Kind::Call,
            3 => Kind::Regs,
            4 => Kind::RegsPartial,
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

    /// Builds the two sections for (address, sp_offset, bp_offset, flags) rows.
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
    fn each_layout_is_told_apart_and_decoded_alike() {
        // sp_reg 5 (rsp), bp_reg 1 (previous sp); then a pt_regs, a partial one, an end.
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
            assert_eq!(kind(0), Kind::Call);
            let e = table.find(TEXT + 0x1f).unwrap();
            assert_eq!(
                (e.sp_offset, e.bp_offset, e.sp_reg, e.bp_reg),
                (16, -16, Reg::Sp, Reg::PrevSp)
            );
            // Between entries the last one below is in force, blocks without an entry included.
            assert_eq!(table.find(TEXT + 0x3ff).unwrap().sp_offset, 24);
            assert_eq!(kind(0x405), Kind::Regs);
            assert_eq!(kind(0x410), Kind::RegsPartial);
            assert_eq!(kind(0x420), Kind::End);
            assert_eq!(table.find(TEXT - 1), None);
            assert_eq!(table.find(TEXT + 0x10_0000), None);
        }
    }

    /// A table that another process read, and one that it only says is one.
    #[test]
    fn a_table_goes_by_its_parts_from_one_process_to_another() {
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
        // Anywhere, also at the end of the address space.
        let top = OrcTable::from_parts(u64::MAX, vec![0, 1, u32::MAX], entries.clone()).unwrap();
        assert!(top.find(u64::MAX).is_some() && top.find(0).is_none());
    }

    #[test]
    fn an_unsorted_table_is_sorted() {
        let (i, e) = sections(AT, &[(TEXT + 0x100, 16, 0, 5), (TEXT, 8, 0, 5)]);
        let table = OrcTable::parse(&i, AT, &e).unwrap();
        assert_eq!(table.find(TEXT + 1).unwrap().sp_offset, 8);
        assert_eq!(table.find(TEXT + 0x100).unwrap().sp_offset, 16);
    }

    #[test]
    fn sections_that_disagree_are_refused() {
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
            // Beyond the last block there is no text and no answer.
            if got.is_some() || probe <= *offs.last().unwrap() {
                prop_assert_eq!(got, want);
            }
        }
    }
}
