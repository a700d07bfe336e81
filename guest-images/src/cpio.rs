//! Writer for initramfs archives in the "newc" cpio format of the Linux kernel.
//!
//! The kernel accepts concatenated archives, so a base initrd can be extended by appending a
//! second, small archive with scripts and programs.
//!
//! Format: `Documentation/driver-api/early-userspace/buffer-format.rst` in Linux.

use std::io::{self, Write};

/// File type bits of a regular file in `st_mode`.
const S_IFREG: u32 = 0o100_000;
/// File type bits of a directory in `st_mode`.
const S_IFDIR: u32 = 0o040_000;
/// File type bits of a symbolic link in `st_mode`.
const S_IFLNK: u32 = 0o120_000;
/// File type bits of a character device in `st_mode`.
const S_IFCHR: u32 = 0o020_000;

/// Writer of an initramfs archive.
///
/// Entries are owned by root, have no time stamps and get increasing inode numbers, so equal inputs
/// produce equal bytes.
pub struct CpioArchive<W: Write> {
    out: W,
    written: u64,
    next_inode: u32,
}

impl<W: Write> CpioArchive<W> {
    /// Starts an archive that is written to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            next_inode: 1,
        }
    }

    /// Adds a directory. Its parent directory must have been added before.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, S_IFDIR | 0o755, (0, 0), &[])
    }

    /// Adds a regular file with the given permission bits.
    pub fn file(&mut self, path: &str, permissions: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, S_IFREG | (permissions & 0o7777), (0, 0), data)
    }

    /// Adds a symbolic link at `path` that points to `target`.
    pub fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, S_IFLNK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a device node of a character device.
    pub fn char_device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, S_IFCHR | 0o600, (major, minor), &[])
    }

    /// Writes the trailer and pads the archive to a multiple of 512 bytes, so that another archive
    /// may follow.
    pub fn finish(mut self) -> io::Result<W> {
        self.next_inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, rdev: (u32, u32), data: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        let size = u32::try_from(data.len()).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{path}: larger than the 4 GiB a cpio entry can hold"),
            )
        })?;
        let links = if mode & S_IFDIR == S_IFDIR { 2 } else { 1 };
        let header = format!(
            "070701{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}",
            self.next_inode,
            mode,
            0, // uid
            0, // gid
            links,
            0, // mtime
            size,
            0, // major and minor of the containing device
            0,
            rdev.0,
            rdev.1,
            path.len() + 1,
            0, // checksum, unused in newc
        );
        self.next_inode += 1;
        self.write(header.as_bytes())?;
        self.write(path.as_bytes())?;
        self.write(&[0])?;
        self.pad(4)?;
        self.write(data)?;
        self.pad(4)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, alignment: u64) -> io::Result<()> {
        let missing = self.written.next_multiple_of(alignment) - self.written;
        const ZEROES: [u8; 512] = [0; 512];
        self.write(&ZEROES[..usize::try_from(missing).unwrap_or(0)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses an archive and returns the path, mode and data of each entry.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let field = |bytes: &[u8], index: usize| {
            let text = std::str::from_utf8(&bytes[6 + index * 8..14 + index * 8]).unwrap();
            u32::from_str_radix(text, 16).unwrap()
        };
        let mut found = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let mode = field(bytes, 1);
            let size = field(bytes, 6) as usize;
            let name_size = field(bytes, 11) as usize;
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            if name == "TRAILER!!!" {
                return found;
            }
            let data = (110 + name_size).next_multiple_of(4);
            found.push((name, mode, bytes[data..data + size].to_vec()));
            bytes = &bytes[(data + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn entries_read_back_as_written() {
        let mut archive = CpioArchive::new(Vec::new());
        archive.directory("bin").unwrap();
        archive.file("/bin/tool", 0o755, b"12345").unwrap();
        archive.symlink("bin/other", "tool").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(
            entries(&bytes),
            [
                ("bin".into(), S_IFDIR | 0o755, vec![]),
                ("bin/tool".into(), S_IFREG | 0o755, b"12345".to_vec()),
                ("bin/other".into(), S_IFLNK | 0o777, b"tool".to_vec()),
            ]
        );
    }

    #[test]
    fn archive_is_padded_for_concatenation() {
        for size in 0..9 {
            let mut archive = CpioArchive::new(Vec::new());
            archive.file("x", 0o644, &vec![7; size]).unwrap();
            assert_eq!(archive.finish().unwrap().len() % 512, 0, "file of {size} bytes");
        }
    }
}
