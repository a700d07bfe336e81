//! Writes the bare-metal guests to a directory (default: `target/guests`) and lists them.

use std::path::PathBuf;
use std::process::ExitCode;

use guest_images::bare_metal::{GUESTS, write_all};

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let dir = args
        .next()
        .map_or_else(|| PathBuf::from("target/guests"), PathBuf::from);
    if args.next().is_some() || dir.as_os_str().as_encoded_bytes().starts_with(b"-") {
        eprintln!("usage: bare-metal-guests [DIRECTORY]");
        return ExitCode::from(2);
    }
    match write_all(&dir) {
        Ok(paths) => {
            for (guest, path) in GUESTS.iter().zip(paths) {
                println!("{}: {}", path.display(), guest.purpose);
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("cannot write the guests: {e}");
            ExitCode::from(2)
        }
    }
}
