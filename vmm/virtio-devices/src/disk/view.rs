//! Read-only access to an image without a lock, while a VM may be using the image.
//!
//! Readers must validate the data, because concurrent writes by the VM may become visible in any
//! order, or not at all.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::config::{DiskConfig, DiskFormat};
use super::image::DiskImageError;
use super::open::open_unlocked;
use super::qcow2::Qcow2;

/// A read-only view of a disk image that is not locked.
#[derive(Debug)]
pub struct UnlockedDiskView {
    config: DiskConfig,
    store: RefCell<ViewStore>,
    bytes: u64,
}

#[derive(Debug)]
enum ViewStore {
    Raw(File),
    Qcow2(Box<Qcow2>),
}

impl ViewStore {
    /// Opens the image without a lock. Returns the image and the size of the disk in bytes.
    fn open(config: &DiskConfig) -> Result<(Self, u64), DiskImageError> {
        let (file, bytes) = open_unlocked(&config.path)?;
        match config.format {
            DiskFormat::Raw => Ok((Self::Raw(file), bytes)),
            DiskFormat::Qcow2 => {
                let qcow2 = Qcow2::open(&config.path, (file, bytes), true, &config.backing)?;
                let bytes = qcow2.bytes();
                Ok((Self::Qcow2(Box::new(qcow2)), bytes))
            }
        }
    }
}

impl UnlockedDiskView {
    /// Opens the image named in `config`. Backing files of a qcow2 image are never written, so they
    /// are locked against writers while the view exists.
    ///
    /// # Errors
    /// Returns a [`DiskImageError`] if the image or a backing file cannot be opened.
    pub fn open(config: &DiskConfig) -> Result<Self, DiskImageError> {
        let (store, bytes) = ViewStore::open(config)?;
        Ok(Self {
            config: config.clone(),
            store: RefCell::new(store),
            bytes,
        })
    }

    /// Reloads the cached metadata of the image. Data that the VM has written to newly allocated
    /// clusters of a qcow2 image is visible only after this call.
    ///
    /// # Errors
    /// Returns a [`DiskImageError`], in which case the previous metadata remains in use. An image
    /// that is being written may temporarily appear damaged.
    pub fn reload(&self) -> Result<(), DiskImageError> {
        if self.config.format == DiskFormat::Qcow2 {
            let (store, _) = ViewStore::open(&self.config)?;
            self.store.replace(store);
        }
        Ok(())
    }

    /// Returns the size of the viewed disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads `to.len()` bytes of the disk at byte offset `at`.
    ///
    /// # Errors
    /// Returns the error of the host or of the image format, or `UnexpectedEof` beyond the end of
    /// the disk.
    pub fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let inside = at
            .checked_add(to.len() as u64)
            .is_some_and(|end| end <= self.bytes);
        if !inside {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match &*self.store.borrow() {
            ViewStore::Raw(file) => file.read_exact_at(to, at),
            ViewStore::Qcow2(image) => image.peek(to, at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::image::DiskImage;

    /// Reads through a disk view succeed while a VM holds the image's lock, and fail beyond the end
    /// of the disk.
    #[test]
    fn image_in_use_can_be_viewed() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("disk");
        let mut bytes = vec![0; 4096];
        bytes[1000..1004].copy_from_slice(b"here");
        std::fs::write(&path, &bytes).unwrap();
        let config = DiskConfig::raw(&path);
        let _in_use = DiskImage::open(&config).unwrap();
        let view = UnlockedDiskView::open(&config).unwrap();
        assert_eq!(view.bytes(), 4096);
        let mut word = [0; 4];
        view.read(1000, &mut word).unwrap();
        assert_eq!(&word, b"here");
        for at in [4093, 4096, u64::MAX] {
            assert!(view.read(at, &mut word).is_err(), "{at}");
        }
        assert!(
            UnlockedDiskView::open(&DiskConfig::raw(temp.path())).is_err(),
            "a directory"
        );
    }
}
