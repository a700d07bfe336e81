//! Reads the processor state of a lab (a test host emulated by QEMU) through QEMU's monitor.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Timeout of a monitor command. QEMU answers even if the emulated machine hangs.
const MONITOR_LIMIT: Duration = Duration::from_secs(5);

/// A connection to QEMU's monitor (QMP).
pub(crate) struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to the monitor and completes the capability negotiation.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(MONITOR_LIMIT))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.execute("{\"execute\":\"qmp_capabilities\"}")?;
        Ok(monitor)
    }

    /// Executes a monitor command and returns its output. Skips events and the greeting of QEMU.
    fn execute(&mut self, command: &str) -> io::Result<String> {
        writeln!(self.0.get_mut(), "{command}")?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(error.to_string()));
            }
            if let Some(value) = answer.get("return") {
                return Ok(value.as_str().unwrap_or_default().to_owned());
            }
        }
    }

    /// Samples the instruction pointer of each processor of the lab `snapshots` times, at intervals
    /// of `between`.
    pub(crate) fn instruction_pointers(
        &mut self,
        snapshots: u32,
        between: Duration,
    ) -> io::Result<BTreeMap<String, Vec<String>>> {
        let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for _ in 0..snapshots {
            let registers = self.execute(
                "{\"execute\":\"human-monitor-command\",\"arguments\":{\"command-line\":\"info registers -a\"}}",
            )?;
            for (processor, pointer) in pointers(&registers) {
                seen.entry(processor).or_default().push(pointer);
            }
            thread::sleep(between);
        }
        Ok(seen)
    }
}

/// Parses the output of `info registers -a`. Returns the name of each processor with its
/// instruction pointer, privilege level and halt state.
fn pointers(registers: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut processor = String::new();
    for line in registers.lines() {
        if let Some(name) = line.trim().strip_prefix("CPU#") {
            processor = format!("CPU#{name}");
        }
        // RIP=ffffffff81a0b2c3 RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1
        if let Some(rest) = line.trim().strip_prefix("RIP=") {
            let mut words = rest.split_whitespace();
            let mut pointer = words.next().unwrap_or_default().to_owned();
            for word in words.filter(|word| ["CPL=3", "HLT=1"].contains(word)) {
                pointer.push(',');
                pointer.push_str(word);
            }
            found.push((processor.clone(), pointer));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monitor_parses_instruction_pointers() {
        let text = "\r\nCPU#0\r\nRAX=1 RBX=2\r\nRIP=ffffffff81000010 RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n\r\n\
                    CPU#1\r\nRIP=0000000000401000 RFL=00000202 [-------] CPL=3 II=0 A20=1 SMM=0 HLT=0\r\n";
        assert_eq!(
            pointers(text),
            [
                ("CPU#0".to_owned(), "ffffffff81000010,HLT=1".to_owned()),
                ("CPU#1".to_owned(), "0000000000401000,CPL=3".to_owned()),
            ]
        );
    }
}
