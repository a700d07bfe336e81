//! Demangles function names supplied by a guest.
//!
//! A mangled name of a few hundred bytes can expand to an arbitrarily long one, because it may
//! contain back-references. The output is therefore bounded.

use std::fmt::{self, Write};

use cpp_demangle::{BorrowedSymbol, DemangleOptions};

/// Maximum length of a demangled name, in bytes.
pub const MAX_NAME: usize = 1024;

/// Demangles `name` if it is mangled, replaces terminal control characters with `?`, and limits the
/// result to [`MAX_NAME`].
pub fn readable(name: &str) -> String {
    let name = &name[..name.floor_char_boundary(MAX_NAME)];
    let plain = rust(name).or_else(|| cpp(name));
    plain.as_deref().unwrap_or(name).replace(char::is_control, "?")
}

fn rust(name: &str) -> Option<String> {
    let mut out = BoundedString::default();
    let demangled = rustc_demangle::try_demangle(name).ok()?;
    // The alternate form omits the hash of Rust symbol names.
    write!(out, "{demangled:#}").ok().map(|()| out.0)
}

fn cpp(name: &str) -> Option<String> {
    if !name.starts_with("_Z") {
        return None;
    }
    let symbol = BorrowedSymbol::new(name.as_bytes()).ok()?;
    let mut out = BoundedString::default();
    symbol
        .structured_demangle(&mut out, &DemangleOptions::default())
        .ok()
        .map(|()| out.0)
}

/// A string of at most [`MAX_NAME`] bytes. Writing beyond this limit returns an error.
#[derive(Default)]
struct BoundedString(String);

impl Write for BoundedString {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MAX_NAME {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_demangled() {
        assert_eq!(readable("_ZN5space3fooEibc"), "space::foo(int, bool, char)");
        assert_eq!(
            readable("_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE"),
            "core::fmt::Write::write_fmt"
        );
        assert_eq!(readable("qsort_r"), "qsort_r");
        assert_eq!(readable("a\x1b[2Jb"), "a?[2Jb");
    }

    /// `readable` returns a mangled name unchanged if demangling would expand it exponentially.
    /// Each component of the name repeats the previous one twice, so the full name would contain
    /// 2^60 times `a`.
    #[test]
    fn exponential_mangled_name_is_kept() {
        let mut name = "_Z1fI1aE".to_owned();
        // Each component adds two substitutions to the mangled name's table, the second of which is
        // the component itself.
        for n in 0..17 {
            let of = char::from_digit(2 * n, 36).unwrap().to_ascii_uppercase();
            name.push_str(&format!("1xIS{of}_S{of}_E"));
        }
        assert_eq!(readable(&name), name);
    }

    proptest! {
        #[test]
        fn demangler_never_panics(name in "(_Z|_R)?[A-Za-z0-9_$.]{0,300}") {
            prop_assert!(readable(&name).len() <= MAX_NAME);
        }
    }
}
