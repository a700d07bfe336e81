//! Reads `/tmp/perf-PID.map`, in which a program lists its JIT-compiled functions. Each line
//! contains the start address and the length in hexadecimal, and the name (the kernel's
//! tools/perf/Documentation/jit-interface.txt). The guest controls the file, so its size and the
//! number of functions are bounded.

use crate::demangle::readable;

/// Maximum size of a perf map, in bytes.
pub const MAX_MAP: u64 = 64 << 20;
/// Maximum number of functions in a perf map.
const MOST_FUNCTIONS: usize = 1 << 20;

/// The JIT-compiled functions of one process.
#[derive(Debug, Default)]
pub struct JitMap {
    /// Functions sorted by start address. If several functions have the same start address, only
    /// the one that the file lists last is kept, because JIT compilers reuse code memory.
    functions: Vec<(u64, u64, String)>,
}

impl JitMap {
    /// Returns the path of the perf map of process `pid`.
    pub fn path(pid: u32) -> String {
        format!("/tmp/perf-{pid}.map")
    }

    /// Parses the contents `bytes` of a perf map. Skips malformed lines, including an incomplete
    /// last line. Stops when the functions occupy `most` bytes of memory.
    pub fn parse(bytes: &[u8], most: u64) -> Self {
        let complete = bytes
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(&[][..], |end| &bytes[..end]);
        let mut left = most;
        let mut functions: Vec<(u64, u64, String)> = complete
            .split(|b| *b == b'\n')
            .filter_map(function)
            .take(MOST_FUNCTIONS)
            .map_while(|function| {
                left = left.checked_sub(bytes_of(&function))?;
                Some(function)
            })
            .collect();
        // The sort below is stable, so of several functions at one address, the last one in the
        // file comes first and is kept.
        functions.reverse();
        functions.sort_by_key(|(start, ..)| *start);
        functions.dedup_by_key(|(start, ..)| *start);
        Self { functions }
    }

    /// Returns the approximate memory used by the map, in bytes.
    pub fn bytes(&self) -> u64 {
        self.functions.iter().map(bytes_of).sum()
    }

    /// Returns the start, the end (exclusive) and the name of the function that contains `address`.
    pub fn resolve(&self, address: u64) -> Option<(u64, u64, &str)> {
        let after = self.functions.partition_point(|(start, ..)| *start <= address);
        let (start, end, name) = self.functions[..after].last()?;
        (address < *end).then_some((*start, *end, name))
    }
}

fn bytes_of(function: &(u64, u64, String)) -> u64 {
    (size_of_val(function) + function.2.len()) as u64
}

fn function(line: &[u8]) -> Option<(u64, u64, String)> {
    let line = std::str::from_utf8(line).ok()?;
    let (start, rest) = line.trim_start().split_once(' ')?;
    let (len, name) = rest.trim_start().split_once(' ')?;
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let (start, len) = (number(start)?, number(len)?);
    let name = readable(name.trim());
    (len > 0 && !name.is_empty()).then_some((start, start.checked_add(len)?, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jit_map_prefers_later_functions() {
        let map = JitMap::parse(
            b"7f00 10 LazyCompile:*add /x.js:1\n7f10 20 old\n0x7f10 8 new\nnonsense\n7f00\n7f40 0 empty\n\xff\xff\n\
              ffffffffffffffff 2 beyond\n7f50 10 not compl",
            u64::MAX,
        );
        assert_eq!(map.resolve(0x7f00).unwrap().2, "LazyCompile:*add /x.js:1");
        assert_eq!(map.resolve(0x7f0f).unwrap().0, 0x7f00);
        assert_eq!(map.resolve(0x7f12), Some((0x7f10, 0x7f18, "new")));
        for address in [0, 0x7eff, 0x7f18, 0x7f40, 0x7f50, u64::MAX] {
            assert_eq!(map.resolve(address), None, "{address:#x}");
        }
        assert!(JitMap::parse(b"", u64::MAX).resolve(0).is_none());
    }
}
