//! Two output pipes of one process, read in the order in which the process wrote to them.
//!
//! Two ordinary pipes do not preserve the order between them, because a process may have written to
//! both several times before the reader runs. This module limits each pipe to a single packet
//! (`O_DIRECT` and a capacity of one page, see pipe(7)), so that a second write to the same pipe
//! waits until the first one is read. At any time, there is at most one packet in each pipe, and
//! epoll(7) in edge-triggered mode reports the pipes in the order in which they became ready. One
//! report corresponds to one packet.
//!
//! The order is exact for writes through the inherited descriptors. A program that reopens
//! `/dev/stdout` writes without packet mode. In this case no data is lost, but two writes may
//! arrive as one.

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::AsRawFd;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::pipe2;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// One of the two output streams of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Capacity of each pipe, in bytes. One page holds one packet.
const CAPACITY_BYTES: i32 = 4096;

/// The read ends of the two pipes that carry a process's output.
pub struct OrderedOutputReceiver {
    stdout: PipeReader,
    stderr: PipeReader,
    epoll: Epoll,
}

/// The write ends of the two pipes, which are passed to a process. They must then be closed in this
/// process.
pub struct OrderedOutputSender {
    /// Standard output of the process.
    pub stdout: PipeWriter,
    /// Standard error of the process.
    pub stderr: PipeWriter,
}

/// Creates the two pipes that carry a process's output.
///
/// # Errors
/// Returns an error if no descriptors are left.
pub fn pipes() -> io::Result<(OrderedOutputReceiver, OrderedOutputSender)> {
    let (stdout, stdout_writer) = packet_pipe()?;
    let (stderr, stderr_writer) = packet_pipe()?;
    let epoll = Epoll::new()?;
    for reader in [&stdout, &stderr] {
        let fd = reader.as_raw_fd();
        let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, fd as u64);
        epoll.ctl(ControlOperation::Add, fd, event)?;
    }
    Ok((
        OrderedOutputReceiver {
            stdout,
            stderr,
            epoll,
        },
        OrderedOutputSender {
            stdout: stdout_writer,
            stderr: stderr_writer,
        },
    ))
}

impl OrderedOutputReceiver {
    /// Passes each packet to `sink` in the order of the writes. Returns when the process has closed
    /// both pipes.
    ///
    /// # Errors
    /// Returns an error if `sink` fails or a pipe cannot be read.
    pub fn forward(&mut self, mut sink: impl FnMut(OutputStream, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buffer = [0; CAPACITY_BYTES as usize];
        let mut events = [EpollEvent::default(); 2];
        let mut closed = [false; 2];
        while closed != [true; 2] {
            let count = match self.epoll.wait(-1, &mut events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            for event in &events[..count] {
                let (stream, pipe) = if event.data() == self.stdout.as_raw_fd() as u64 {
                    (OutputStream::Stdout, &mut self.stdout)
                } else {
                    (OutputStream::Stderr, &mut self.stderr)
                };
                // Read one packet per report, because a second packet may be newer than a packet in
                // the other pipe.
                let mut length = read_packet(pipe, &mut buffer)?;
                if let Some(length @ 1..) = length {
                    sink(stream, &buffer[..length])?;
                }
                // The end of the stream may have been reported together with the last packet.
                if event.event_set().contains(EventSet::HANG_UP) && length != Some(0) {
                    length = read_packet(pipe, &mut buffer)?;
                    if let Some(length @ 1..) = length {
                        sink(stream, &buffer[..length])?;
                    }
                }
                closed[stream as usize] |= length == Some(0);
            }
        }
        Ok(())
    }
}

/// Reads one packet into `buffer` without waiting and returns its length. Returns `None` if the
/// pipe contains no packet, and `Some(0)` at the end of the stream.
fn read_packet(pipe: &mut PipeReader, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match pipe.read(buffer) {
        Ok(length) => Ok(Some(length)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Creates a pipe that holds one packet. Its read end is non-blocking.
fn packet_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_DIRECT)?;
    fcntl(&writer, FcntlArg::F_SETPIPE_SZ(CAPACITY_BYTES))?;
    fcntl(&reader, FcntlArg::F_SETFL(OFlag::O_NONBLOCK | OFlag::O_DIRECT))?;
    Ok((PipeReader::from(reader), PipeWriter::from(writer)))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Runs a shell script and returns the packets that it writes. Consecutive packets of the same
    /// stream are merged.
    fn run(script: &str) -> Vec<(OutputStream, String)> {
        let (mut output, input) = pipes().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(input.stdout)
            .stderr(input.stderr)
            .spawn()
            .unwrap();
        let mut seen: Vec<(OutputStream, String)> = Vec::new();
        output
            .forward(|stream, bytes| {
                let text = std::str::from_utf8(bytes).unwrap();
                match seen.last_mut() {
                    Some((last, all)) if *last == stream => all.push_str(text),
                    _ => seen.push((stream, text.to_owned())),
                }
                Ok(())
            })
            .unwrap();
        assert!(child.wait().unwrap().success());
        seen
    }

    /// The order of lines on standard output and standard error is preserved, although the shell
    /// writes lines faster than the test reads them.
    #[test]
    fn streams_keep_the_order_in_which_they_were_written() {
        let seen = run("for i in $(seq 500); do echo out $i; echo err $i >&2; done");
        let expected: Vec<_> = (1..=500)
            .flat_map(|i| {
                [
                    (OutputStream::Stdout, format!("out {i}\n")),
                    (OutputStream::Stderr, format!("err {i}\n")),
                ]
            })
            .collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn order_is_kept_between_processes_that_wait_for_each_other() {
        let seen = run("for i in $(seq 50); do sh -c 'echo a; echo b'; sh -c 'echo c >&2'; done");
        assert_eq!(seen.len(), 100);
        for pair in seen.chunks(2) {
            assert_eq!(pair[0], (OutputStream::Stdout, "a\nb\n".to_owned()));
            assert_eq!(pair[1], (OutputStream::Stderr, "c\n".to_owned()));
        }
    }

    #[test]
    fn writes_larger_than_a_packet_arrive_whole() {
        let seen = run("head -c 300000 /dev/zero | tr '\\0' x; echo end >&2; echo more");
        assert_eq!(seen.len(), 3);
        assert_eq!(seen[0].1.len(), 300_000);
        assert_eq!(seen[1], (OutputStream::Stderr, "end\n".to_owned()));
        assert_eq!(seen[2], (OutputStream::Stdout, "more\n".to_owned()));
    }

    /// Ordered output works if a program closes one stream early, writes nothing, or reopens its
    /// own output.
    #[test]
    fn streams_end_one_by_one_and_can_be_opened_again() {
        assert_eq!(
            run("exec >&-; echo err >&2"),
            [(OutputStream::Stderr, "err\n".to_owned())]
        );
        assert_eq!(run("true"), []);
        let seen = run("echo a >/dev/stderr; echo b >/dev/stdout; echo c >/proc/self/fd/2");
        // Writes through a reopened stream may be merged, so the order between the streams is not
        // preserved.
        let text_of = |stream| -> String {
            let of_stream = seen.iter().filter(|(from, _)| *from == stream);
            of_stream.map(|(_, text)| text.as_str()).collect()
        };
        assert_eq!(text_of(OutputStream::Stderr), "a\nc\n");
        assert_eq!(text_of(OutputStream::Stdout), "b\n");
    }

    #[test]
    fn sink_that_fails_ends_the_forwarding() {
        let (mut output, mut input) = pipes().unwrap();
        io::Write::write_all(&mut input.stdout, b"x").unwrap();
        let error = output
            .forward(|_, _| Err(io::ErrorKind::BrokenPipe.into()))
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
