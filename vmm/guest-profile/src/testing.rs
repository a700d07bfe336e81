//! A small synthetic guest for tests, with RAM and page tables.

/// RAM of a test guest from guest-physical address 0. Page tables are allocated downwards from its
/// end.
pub struct TestGuest {
    /// Contents of the guest's RAM.
    pub ram: Vec<u8>,
    /// Guest-physical address of the root page table, which is the value for CR3.
    pub root: u64,
    la57: bool,
    next: u64,
}

impl TestGuest {
    /// Creates a guest with `bytes` bytes of RAM (a multiple of 4 KiB) and an empty root table.
    pub fn new(bytes: usize, la57: bool) -> Self {
        let root = bytes as u64 - 4096;
        Self {
            ram: vec![0; bytes],
            root,
            la57,
            next: root,
        }
    }

    /// Maps the page that contains `gva` to `gpa`. A `level` of 1, 2 or 3 selects a page size of 4
    /// KiB, 2 MiB or 1 GiB.
    pub fn map(&mut self, gva: u64, gpa: u64, level: u32) {
        let mut table = self.root;
        for l in (level + 1..=if self.la57 { 5 } else { 4 }).rev() {
            let at = table + 8 * ((gva >> (12 + 9 * (l - 1))) & 0x1FF);
            let entry = self.get(at);
            table = if entry & 1 != 0 {
                entry & 0x000F_FFFF_FFFF_F000
            } else {
                self.next -= 4096;
                let fresh = self.next;
                self.put(at, fresh | 7);
                fresh
            };
        }
        let ps = if level > 1 { 0x80 } else { 0 };
        self.put(
            table + 8 * ((gva >> (12 + 9 * (level - 1))) & 0x1FF),
            gpa | 7 | ps,
        );
    }

    /// Reads the 8 bytes at the guest-physical address `gpa`.
    pub fn get(&self, gpa: u64) -> u64 {
        u64::from_le_bytes(self.ram[gpa as usize..gpa as usize + 8].try_into().unwrap())
    }

    /// Writes 8 bytes to the guest-physical address `gpa`.
    pub fn put(&mut self, gpa: u64, value: u64) {
        self.ram[gpa as usize..gpa as usize + 8].copy_from_slice(&value.to_le_bytes());
    }
}

/// Builds the sections `.orc_unwind_ip` (for the address `at`) and `.orc_unwind` from rows of
/// address, sp_offset, bp_offset and flags.
pub(crate) fn orc_sections(at: u64, rows: &[(u64, i16, i16, u16)]) -> (Vec<u8>, Vec<u8>) {
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
