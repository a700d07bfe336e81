//! CMOS memory and real-time clock: 128 bytes, which include the time in BCD and the memory sizes
//! that PC firmware stores.

use std::time::{SystemTime, UNIX_EPOCH};

use snapshot::state::SavedLegacyDevices;

use super::ports::CMOS_CENTURY;

/// Value of status register A: 32768 Hz divider, 1024 Hz rate, no update in progress.
const STATUS_A: u8 = 0x26;
/// Status register B: 24-hour mode, BCD.
const STATUS_B: u8 = 0x02;
/// Status register D: the battery is good.
const STATUS_D: u8 = 0x80;
const REG_A: u8 = 0x0A;
const REG_B: u8 = 0x0B;
const REG_C: u8 = 0x0C;
const REG_D: u8 = 0x0D;
/// Unit in bytes of the registers that report conventional memory and the memory above 1 MiB.
const KIB: u64 = 1 << 10;
/// Unit in bytes of the registers that report the memory above 16 MiB and above 4 GiB.
const UNIT_64_KIB: u64 = 64 << 10;

/// The CMOS device: memory and real-time clock.
#[derive(Debug)]
pub(super) struct Cmos {
    index: u8,
    memory: [u8; 128],
}

/// A UTC date and time in calendar form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Utc {
    year: u64,
    month: u8,
    day: u8,
    /// Day of the week; 1 is Sunday.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

/// Converts the time since 1970, in seconds, to a UTC date and time. Uses Howard Hinnant's
/// `civil_from_days` algorithm.
#[expect(
    clippy::cast_possible_truncation,
    reason = "days, months and weekdays are below 256"
)]
fn utc(seconds: u64) -> Utc {
    let days = seconds / 86_400;
    let of_day = seconds % 86_400;
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    Utc {
        year: year_of_era + era * 400 + u64::from(month <= 2),
        month: month as u8,
        day: day as u8,
        weekday: ((days + 4) % 7 + 1) as u8,
        hour: (of_day / 3600) as u8,
        minute: (of_day / 60 % 60) as u8,
        second: (of_day % 60) as u8,
    }
}

fn bcd(value: u8) -> u8 {
    ((value / 10) << 4) | (value % 10)
}

impl Cmos {
    pub fn new(ram_bytes: u64, cpus: u8) -> Self {
        let mut memory = [0u8; 128];
        let mut word = |at: usize, value: u64| {
            let value = value.min(0xFFFF) as u16;
            memory[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        let low = ram_bytes.min(crate::memory::MMIO_HOLE_START);
        let above_1m = low.saturating_sub(1 << 20) / KIB;
        word(0x15, 640);
        word(0x17, above_1m);
        word(0x30, above_1m);
        word(0x34, low.saturating_sub(16 << 20) / UNIT_64_KIB);
        let high = ((ram_bytes - low) / UNIT_64_KIB).min(0xFF_FFFF) as u32;
        memory[0x5B..0x5E].copy_from_slice(&high.to_le_bytes()[..3]);
        memory[0x5F] = cpus.saturating_sub(1);
        memory[usize::from(REG_A)] = STATUS_A;
        memory[usize::from(REG_B)] = STATUS_B;
        Cmos { index: 0, memory }
    }

    /// Copies the registers to `board`, for a snapshot.
    pub fn save(&self, board: &mut SavedLegacyDevices) {
        board.cmos_index = self.index;
        board.cmos = self.memory.to_vec().into();
    }

    /// Restores the registers from a snapshot. Returns `false` if their number is not 128.
    pub fn restore(&mut self, board: &SavedLegacyDevices) -> bool {
        let Ok(memory) = <[u8; 128]>::try_from(board.cmos.0.as_slice()) else {
            return false;
        };
        self.memory = memory;
        self.select(board.cmos_index);
        true
    }

    /// Selects the register that the data port accesses. Bit 7 of `value`, which disables NMIs on a
    /// PC, is ignored.
    pub fn select(&mut self, value: u8) {
        self.index = value & 0x7F;
    }

    pub fn read(&self) -> u8 {
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        self.read_at(self.index, seconds)
    }

    fn read_at(&self, index: u8, seconds: u64) -> u8 {
        let now = utc(seconds);
        // Status B bit 2 selects binary values.
        let encode = |v: u8| {
            if self.memory[usize::from(REG_B)] & 0x04 != 0 {
                v
            } else {
                bcd(v)
            }
        };
        match index {
            0x00 => encode(now.second),
            0x02 => encode(now.minute),
            0x04 => encode(now.hour),
            0x06 => encode(now.weekday),
            0x07 => encode(now.day),
            0x08 => encode(now.month),
            0x09 => encode((now.year % 100) as u8),
            CMOS_CENTURY => encode((now.year / 100 % 100) as u8),
            // No interrupt is ever pending, so a read has nothing to clear.
            REG_C => 0,
            REG_D => STATUS_D,
            other => self.memory[usize::from(other & 0x7F)],
        }
    }

    /// Writes the selected register. Ignores writes to the time and to read-only registers, because
    /// the clock follows that of the host.
    pub fn write(&mut self, value: u8) {
        match self.index {
            0x00 | 0x02 | 0x04 | 0x06..=0x09 | CMOS_CENTURY | REG_C | REG_D => {}
            // Update-in-progress is read-only, and 24-hour mode is the only mode.
            REG_A => self.memory[usize::from(REG_A)] = value & 0x7F,
            REG_B => self.memory[usize::from(REG_B)] = value | STATUS_B,
            index => self.memory[usize::from(index)] = value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rtc_date_handles_leap_days_and_centuries() {
        let at = |s: u64| {
            let u = utc(s);
            (u.year, u.month, u.day, u.weekday)
        };
        assert_eq!(at(0), (1970, 1, 1, 5)); // a Thursday
        assert_eq!(at(951_782_400), (2000, 2, 29, 3)); // a Tuesday
        assert_eq!(at(951_868_800), (2000, 3, 1, 4));
        assert_eq!(at(1_735_689_599), (2024, 12, 31, 3));
        let u = utc(1_735_689_599);
        assert_eq!((u.hour, u.minute, u.second), (23, 59, 59));
    }

    #[test]
    fn rtc_time_reads_in_bcd_or_binary() {
        let mut c = Cmos::new(16 << 20, 1);
        assert_eq!(c.read_at(0x00, 1_735_689_599), 0x59);
        assert_eq!(c.read_at(0x09, 1_735_689_599), 0x24);
        assert_eq!(c.read_at(0x32, 1_735_689_599), 0x20);
        assert_eq!(c.read_at(REG_A, 0) & 0x80, 0);
        c.select(0x80 | REG_B);
        c.write(0x06);
        assert_eq!(c.read_at(0x00, 1_735_689_599), 59);
    }

    #[test]
    fn cmos_memory_sizes_saturate() {
        let word = |c: &Cmos, at: u8| u16::from_le_bytes([c.read_at(at, 0), c.read_at(at + 1, 0)]);
        let c = Cmos::new(64 << 20, 64);
        assert_eq!(word(&c, 0x17), 63 * 1024);
        assert_eq!(word(&c, 0x34), 48 * 16);
        assert_eq!(c.read_at(0x5F, 0), 63);
        let c = Cmos::new(8 << 30, 1);
        assert_eq!(word(&c, 0x30), 0xFFFF);
        assert_eq!(c.read_at(0x5D, 0), 1);
    }

    /// Guest writes change only the CMOS memory. They cannot change the time, report an empty
    /// battery, or leave an interrupt or update pending forever.
    #[test]
    fn cmos_writes_do_not_change_clock() {
        for value in [0u8, 0x55, 0xAA, 0xFF] {
            let mut c = Cmos::new(64 << 20, 2);
            let before: Vec<u8> = (0..128).map(|at| c.read_at(at, 951_782_400)).collect();
            for at in 0..=u8::MAX {
                c.select(at);
                c.write(value);
            }
            // Binary format, if the guest has selected it.
            let binary = value & 4 != 0;
            for (at, was) in (0u8..).zip(before) {
                let now = c.read_at(at, 951_782_400);
                let right = match at {
                    0 | 2 | 4 | 6..=9 | CMOS_CENTURY if binary => (was >> 4) * 10 + (was & 15),
                    0 | 2 | 4 | 6..=9 | CMOS_CENTURY | REG_D => was,
                    REG_C => 0,
                    REG_A => value & 0x7F,
                    REG_B => value | STATUS_B,
                    _ => value,
                };
                assert_eq!(now, right, "{at:#x} after {value:#x}");
            }
        }
    }

    /// Bit 7 of a value that the guest writes to the CMOS index port, which disables NMIs on a PC,
    /// does not affect the selection of a register.
    #[test]
    fn cmos_index_ignores_bit_7() {
        let mut c = Cmos::new(64 << 20, 2);
        c.select(0x80 | 0x40);
        c.write(0x5A);
        c.select(0x40);
        assert_eq!(c.read(), 0x5A);
    }
}
