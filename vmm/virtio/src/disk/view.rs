//! A look at an image that a VM may be using: read only, and without a lock.
//!
//! What the VM writes meanwhile is seen or not, in whatever order: who looks must check what he finds.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::config::{DiskConfig, Format};
use super::image::ImageError;
use super::open::look;
use super::qcow2::Qcow2;

/// An image that is looked at.
#[derive(Debug)]
pub struct View {
    config: DiskConfig,
    store: RefCell<Store>,
    bytes: u64,
}

#[derive(Debug)]
enum Store {
    Raw(File),
    Qcow2(Box<Qcow2>),
}

impl Store {
    /// As the image is now, and the bytes of the disk.
    fn open(config: &DiskConfig) -> Result<(Self, u64), ImageError> {
        let (file, bytes) = look(&config.path)?;
        match config.format {
            Format::Raw => Ok((Self::Raw(file), bytes)),
            Format::Qcow2 => {
                let qcow2 = Qcow2::open(&config.path, (file, bytes), true, &config.backing)?;
                let bytes = qcow2.bytes();
                Ok((Self::Qcow2(Box::new(qcow2)), bytes))
            }
        }
    }
}

impl View {
    /// Opens the image that `config` names. The files behind a qcow2 image, which nobody writes, are locked
    /// against writers as long as it is looked at.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(config: &DiskConfig) -> Result<Self, ImageError> {
        let (store, bytes) = Store::open(config)?;
        Ok(Self {
            config: config.clone(),
            store: RefCell::new(store),
            bytes,
        })
    }

    /// Sees what was written since the image was opened: the tables of a qcow2 image are kept once they were
    /// read, so what the guest has written to clusters that it had not used before is not seen without this.
    ///
    /// # Errors
    /// [`ImageError`]; the image is seen as before. One that is being written may look damaged for a moment.
    pub fn look_again(&self) -> Result<(), ImageError> {
        if self.config.format == Format::Qcow2 {
            let (store, _) = Store::open(&self.config)?;
            self.store.replace(store);
        }
        Ok(())
    }

    /// Bytes of the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills `to` from byte `at` of the disk on.
    ///
    /// # Errors
    /// That of the host or of what is in the image; `UnexpectedEof` beyond its end.
    pub fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let inside = at
            .checked_add(to.len() as u64)
            .is_some_and(|end| end <= self.bytes);
        if !inside {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match &*self.store.borrow() {
            Store::Raw(file) => file.read_exact_at(to, at),
            Store::Qcow2(image) => image.look(to, at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::image::Image;

    /// While a VM holds its lock, and never beyond the end.
    #[test]
    fn an_image_in_use_can_be_looked_at() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("disk");
        let mut bytes = vec![0; 4096];
        bytes[1000..1004].copy_from_slice(b"here");
        std::fs::write(&path, &bytes).unwrap();
        let config = DiskConfig::raw(&path);
        let _in_use = Image::open(&config).unwrap();
        let view = View::open(&config).unwrap();
        assert_eq!(view.bytes(), 4096);
        let mut word = [0; 4];
        view.read(1000, &mut word).unwrap();
        assert_eq!(&word, b"here");
        for at in [4093, 4096, u64::MAX] {
            assert!(view.read(at, &mut word).is_err(), "{at}");
        }
        assert!(View::open(&DiskConfig::raw(temp.path())).is_err(), "a directory");
    }
}
