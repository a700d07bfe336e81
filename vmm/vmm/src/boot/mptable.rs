//! The MP configuration table, for kernels without ACPI support (Intel MultiProcessor Specification
//! 1.4, chapter 4).

use super::acpi::IO_APIC_ID;
use super::layout;
use crate::numbers::VcpuCountRange;

/// Version of the local APICs in the MP table, equal to that of KVM's (0x14).
const APIC_VERSION: u8 = 0x14;
/// Version of the I/O APIC in the MP table, equal to that of KVM's (0x11).
const IO_APIC_VERSION: u8 = 0x11;
/// Type of an MP table entry that describes a processor (table 4-2).
const PROCESSOR: u8 = 0;
/// Type of an MP table entry that describes a bus.
const BUS: u8 = 1;
/// Type of an MP table entry that describes an I/O APIC.
const IO_APIC: u8 = 2;
/// Type of an MP table entry that routes an interrupt to an I/O APIC.
const IO_INTERRUPT: u8 = 3;
/// Type of an MP table entry that routes an interrupt to the local APICs.
const LOCAL_INTERRUPT: u8 = 4;
/// Interrupt type of an MP table entry (table 4-10): vectored interrupt.
const INT: u8 = 0;
/// Interrupt type of an MP table entry: NMI.
const NMI: u8 = 1;
/// Interrupt type of an MP table entry: interrupt from the 8259 PICs.
const EXTINT: u8 = 3;
/// CPU signature in the MP table: family 6. Kernels read the exact signature from CPUID.
const CPU_SIGNATURE: u32 = 0x600;
/// CPU feature flags in the MP table: FPU and APIC are present.
const CPU_FEATURES: u32 = 0x201;

/// Returns the MP floating pointer structure followed by the MP configuration table, for
/// [`layout::MP_TABLE`].
#[expect(
    clippy::cast_possible_truncation,
    reason = "the layout puts it below 4 GiB, and 255 processors take 5 KiB"
)]
pub(crate) fn table(cpus: VcpuCountRange) -> Vec<u8> {
    let config_at = layout::MP_TABLE as u32 + 16;
    let mut entries: Vec<u8> = Vec::new();
    let mut count: u16 = 0;
    let mut push = |bytes: &[u8]| {
        entries.extend_from_slice(bytes);
        count += 1;
    };
    for id in 0..cpus.max() {
        // Flags: bit 0 enabled, bit 1 the boot processor. A hot-pluggable processor is not enabled.
        let flags = match id {
            0 => 3,
            _ if id < cpus.present() => 1,
            _ => 0,
        };
        let mut entry = vec![PROCESSOR, id, APIC_VERSION, flags];
        entry.extend_from_slice(&CPU_SIGNATURE.to_le_bytes());
        entry.extend_from_slice(&CPU_FEATURES.to_le_bytes());
        entry.extend_from_slice(&[0; 8]);
        push(&entry);
    }
    push(&[&[BUS, 0][..], b"ISA   "].concat());
    push(
        &[
            &[IO_APIC, IO_APIC_ID, IO_APIC_VERSION, 1][..],
            &layout::IO_APIC.to_le_bytes(),
        ]
        .concat(),
    );
    for irq in 0..16u8 {
        // IRQ 2 is the cascade and has no input. KVM's default routing connects every other IRQ,
        // including the timer's IRQ 0, to the input of the same number.
        if irq != 2 {
            push(&[IO_INTERRUPT, INT, 0, 0, 0, irq, IO_APIC_ID, irq]);
        }
    }
    push(&[LOCAL_INTERRUPT, EXTINT, 0, 0, 0, 0, 0, 0]);
    push(&[LOCAL_INTERRUPT, NMI, 0, 0, 0, 0, 0xFF, 1]);

    let mut config = Vec::with_capacity(44 + entries.len());
    config.extend_from_slice(b"PCMP");
    config.extend_from_slice(&(44 + entries.len() as u16).to_le_bytes());
    config.push(4); // revision 1.4
    config.push(0); // checksum, below
    config.extend_from_slice(b"PERFVI  ");
    config.extend_from_slice(b"PERFVISOR   ");
    config.extend_from_slice(&[0; 6]); // no OEM table
    config.extend_from_slice(&count.to_le_bytes());
    config.extend_from_slice(&layout::LOCAL_APIC.to_le_bytes());
    config.extend_from_slice(&[0; 4]); // no extended entries
    config.extend_from_slice(&entries);
    config[7] = checksum(&config);

    let mut table = b"_MP_".to_vec();
    table.extend_from_slice(&config_at.to_le_bytes());
    table.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]); // 16 bytes, revision 1.4, table present
    table[10] = checksum(&table);
    table.extend_from_slice(&config);
    table
}

fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |a, b| a.wrapping_add(*b)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mp_table_is_well_formed_for_every_cpu_count() {
        let fixed = (1..=layout::MAX_CPUS).map(|n| VcpuCountRange::fixed(n).unwrap());
        for cpus in fixed.chain([
            VcpuCountRange::new(2, 5).unwrap(),
            VcpuCountRange::new(1, 64).unwrap(),
        ]) {
            let t = table(cpus);
            assert!(layout::MP_TABLE + t.len() as u64 <= layout::MP_END);
            assert_eq!(checksum(&t[..16]), 0);
            let config = &t[16..];
            assert_eq!(checksum(config), 0);
            assert_eq!(u16::from_le_bytes([config[4], config[5]]) as usize, config.len());
            let count = u16::from_le_bytes([config[34], config[35]]);
            let (mut at, mut seen, mut processors, mut enabled) = (44, 0, 0, 0);
            while at < config.len() {
                let processor = config[at] == PROCESSOR;
                processors += u32::from(processor);
                enabled += u32::from(processor && config[at + 3] & 1 != 0);
                at += if processor { 20 } else { 8 };
                seen += 1;
            }
            assert_eq!(
                (at, seen, processors, enabled),
                (
                    config.len(),
                    count,
                    u32::from(cpus.max()),
                    u32::from(cpus.present())
                )
            );
        }
    }
}
