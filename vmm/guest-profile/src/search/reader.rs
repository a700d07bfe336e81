//! The reader process of a kernel search, which parses the kernel's tables. It has no access to
//! guest memory and requests each range that it reads from the requester process.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::rc::Rc;

use kernel_images::image::KernelImage;

use super::found_kernel::KernelTableReadError;
use super::wire::{self, KernelSummary, MemoryRequest, PIECE, SearchRequest};
use crate::locate;
use crate::task::TaskLayout;
use crate::task::areas::KernelPageTables;
use crate::{GuestPhys, MappedGuestPage};

/// Size of the blocks in which guest memory is requested, in bytes. A block is larger than most
/// reads, because neighboring memory is usually read next.
const BLOCK: usize = 64 << 10;
/// Maximum number of blocks of guest memory that the reader caches.
const MAX_BLOCKS: usize = 256;
const PAGE: usize = 4096;
/// Maximum size of the symbol text, in bytes. Distribution kernels have 5 to 15 million bytes.
pub(super) const MAX_SYMBOL_BYTES: usize = 64 << 20;
/// Maximum number of unwind table entries. Distribution kernels have half a million.
pub(super) const MAX_ENTRIES: usize = 4 << 20;

/// Serves one search request on `stream`.
///
/// # Errors
/// Returns an error if the requester has closed the connection or sent an invalid request.
pub fn serve(mut stream: impl Read + Write) -> io::Result<()> {
    let (letter, length) = wire::head(&mut stream)?;
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    if letter != wire::ASK {
        return Err(ErrorKind::InvalidData.into());
    }
    let SearchRequest { regs, anchors } = serde_json::from_slice(&bytes)?;
    let memory = RemoteMemory::new(stream);
    let read = locate::read_kernel(&memory, &regs, &anchors);
    let read = read
        .map_err(|e| KernelTableReadError(e.to_string()))
        .and_then(|image| {
            // The slide is 0, because the image was read at its run-time addresses.
            let tables = KernelPageTables::find(&memory, &regs, &image, 0);
            Ok((text_of(&image)?, image, tables))
        });
    let mut stream = memory.stream.into_inner();
    match read {
        Ok((text, image, tables)) => tell(&mut stream, &image, &text, tables),
        Err(why) => wire::send(&mut stream, wire::FAILED, why.0.as_bytes()),
    }
}

/// Formats the kernel's symbols as text in the format of `/proc/kallsyms`.
fn text_of(image: &KernelImage) -> Result<Vec<u8>, KernelTableReadError> {
    let mut text = Vec::new();
    if let Some(symbols) = image.symbols() {
        // Writing to a Vec cannot fail.
        let _ = symbols.write_text(&mut text);
    }
    if text.len() > MAX_SYMBOL_BYTES {
        return Err(KernelTableReadError(format!(
            "its symbols take {} MiB, and at most {} are taken",
            text.len() >> 20,
            MAX_SYMBOL_BYTES >> 20
        )));
    }
    Ok(text)
}

/// Sends the symbols, the unwind tables and the summary of a found kernel to the requester process.
fn tell(
    stream: &mut impl Write,
    image: &KernelImage,
    text: &[u8],
    tables: Option<KernelPageTables>,
) -> io::Result<()> {
    for piece in text.chunks(PIECE) {
        wire::send(stream, wire::SYMBOLS, piece)?;
    }
    let orc = image.orc().filter(|orc| orc.len() <= MAX_ENTRIES);
    if let Some(orc) = orc {
        for piece in orc.offsets().chunks(PIECE / size_of::<u32>()) {
            let bytes: Vec<u8> = piece.iter().flat_map(|offset| offset.to_le_bytes()).collect();
            wire::send(stream, wire::OFFSETS, &bytes)?;
        }
        let entries = orc.entries().as_flattened();
        for piece in entries.chunks(PIECE / kernel_images::orc::ENTRY_SIZE * kernel_images::orc::ENTRY_SIZE) {
            wire::send(stream, wire::ENTRIES, piece)?;
        }
    }
    let entry = image.entry_text();
    let summary = KernelSummary {
        orc_base: orc.map(|orc| orc.base()),
        entry_text: (entry.start, entry.end),
        tasks: TaskLayout::new(image, 0).map_err(|e| KernelTableReadError(e.to_string())),
        tables,
        symbols: image.symbols().map_or(0, |symbols| symbols.len() as u64),
        release: image.release().map(str::to_owned),
        build_id: image.build_id().map(|id| id.to_string()),
    };
    wire::send(stream, wire::FOUND, &serde_json::to_vec(&summary)?)
}

/// Guest memory that another process (the requester) holds and that is requested from it block by
/// block. Blocks are cached, so later changes by the guest may not be visible.
pub(super) struct RemoteMemory<S> {
    stream: RefCell<S>,
    /// Blocks by block number, if the whole block is RAM; `None` if a part of the block is not RAM.
    blocks: RefCell<HashMap<u64, Option<Rc<[u8]>>>>,
    /// Pages by page number, for blocks of which only a part is RAM. A value is `None` if the page
    /// is not RAM.
    pages: RefCell<HashMap<u64, Option<Rc<[u8]>>>>,
}

/// A page of guest memory, copied from the requester.
pub(super) struct RemotePage {
    bytes: Rc<[u8]>,
    start: usize,
}

impl MappedGuestPage for RemotePage {
    fn read(&self, offset: usize, buf: &mut [u8]) -> bool {
        let inside = offset.checked_add(buf.len()).is_some_and(|end| end <= PAGE);
        let from = self.bytes.get(self.start..).and_then(|page| page.get(offset..));
        match from.and_then(|from| from.get(..buf.len())) {
            Some(bytes) if inside => {
                buf.copy_from_slice(bytes);
                true
            }
            _ => false,
        }
    }
}

impl<S: Read + Write> RemoteMemory<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream: RefCell::new(stream),
            blocks: RefCell::default(),
            pages: RefCell::default(),
        }
    }

    /// Requests the guest memory at `gpa` from the requester, at most [`PIECE`] bytes. Returns
    /// `false` if the range is not completely RAM or the requester has exited.
    fn borrow(&self, gpa: u64, into: &mut [u8]) -> bool {
        let mut asked = || -> io::Result<bool> {
            let stream = &mut *self.stream.borrow_mut();
            let bytes = u32::try_from(into.len()).map_err(|_| ErrorKind::InvalidInput)?;
            wire::send(stream, wire::READ, &MemoryRequest { gpa, bytes }.to_bytes())?;
            match wire::head(stream)? {
                (wire::MEMORY, length) if length == into.len() => {
                    stream.read_exact(into)?;
                    Ok(true)
                }
                (wire::NO_MEMORY, 0) => Ok(false),
                _ => Err(ErrorKind::InvalidData.into()),
            }
        };
        asked().unwrap_or(false)
    }

    fn kept(
        &self,
        kept: &RefCell<HashMap<u64, Option<Rc<[u8]>>>>,
        number: u64,
        bytes: usize,
    ) -> Option<Rc<[u8]>> {
        let mut kept = kept.borrow_mut();
        if kept.len() >= MAX_BLOCKS && !kept.contains_key(&number) {
            kept.clear();
        }
        let lend = || {
            let mut into = vec![0; bytes];
            let gpa = number.checked_mul(bytes as u64)?;
            self.borrow(gpa, &mut into).then(|| into.into())
        };
        kept.entry(number).or_insert_with(lend).clone()
    }
}

impl<S: Read + Write> GuestPhys for RemoteMemory<S> {
    type Page<'a>
        = RemotePage
    where
        Self: 'a;

    #[expect(clippy::cast_possible_truncation, reason = "below a block's size")]
    fn page(&self, gpa: u64) -> Option<RemotePage> {
        if let Some(bytes) = self.kept(&self.blocks, gpa / BLOCK as u64, BLOCK) {
            let within = (gpa % BLOCK as u64) as usize;
            return Some(RemotePage {
                bytes,
                start: within - within % PAGE,
            });
        }
        let bytes = self.kept(&self.pages, gpa / PAGE as u64, PAGE)?;
        Some(RemotePage { bytes, start: 0 })
    }

    #[expect(clippy::cast_possible_truncation, reason = "below a page's size")]
    fn read(&self, gpa: u64, buf: &mut [u8]) -> bool {
        let (mut at, mut rest) = (Some(gpa), buf);
        while !rest.is_empty() {
            let Some(from) = at else { return false };
            let in_page = PAGE - (from % PAGE as u64) as usize;
            let large = rest.len() >= BLOCK;
            let length = if large {
                rest.len().min(PIECE)
            } else {
                rest.len().min(in_page)
            };
            let (now, later) = rest.split_at_mut(length);
            let there = if large {
                self.borrow(from, now)
            } else {
                let page = self.page(from);
                page.is_some_and(|page| page.read((from % PAGE as u64) as usize, now))
            };
            if !there {
                return false;
            }
            at = from.checked_add(length as u64);
            rest = later;
        }
        true
    }
}
