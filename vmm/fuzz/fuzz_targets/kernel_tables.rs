//! Fuzzes parsers of kernel images and tables, read from a file or from guest memory. The first
//! byte selects the parser.
#![no_main]

use libfuzzer_sys::fuzz_target;
use kernel_images::btf::Btf;
use kernel_images::{bzimage, elf};
use kernel_images::image::KernelImage;
use kernel_images::orc::OrcTable;
use guest_profile::programs::ProgramSymbols;
use kernel_images::symbols::KernelSymbols;
use kernel_images::kallsyms;
use guest_profile::task::TaskLayout;

fuzz_target!(|data: &[u8]| {
    let Some((&which, data)) = data.split_first() else {
        return;
    };
    match which % 8 {
        0 => {
            if let Ok(image) = KernelImage::parse("fuzz", data) {
                let _ = TaskLayout::new(&image, 0);
            }
        }
        1 => {
            let _ = kallsyms::find(data);
        }
        2 => {
            if let Ok(btf) = Btf::parse(data) {
                let _ = (
                    btf.offset_of("a", "b.c"),
                    btf.size_of("a"),
                    btf.variable("a", "b"),
                );
            }
        }
        3 => {
            let (ips, entries) = data.split_at(data.len() / 10 * 4);
            if let Ok(table) = OrcTable::parse(ips, 0xffff_ffff_8200_0000, entries) {
                let _ = table.find(0xffff_ffff_8100_0000);
            }
        }
        4 => {
            let _ = KernelSymbols::parse_text(data);
        }
        5 => {
            if let Ok(header) = bzimage::setup_header("fuzz", data) {
                let _ = bzimage::payload("fuzz", data, &header);
            }
        }
        6 => {
            let _ = elf::parse("fuzz", data);
        }
        _ => {
            if let Ok(object) = ProgramSymbols::parse(data) {
                let _ = (object.resolve(0x1000), object.line(0x1000));
            }
        }
    }
});
