//! Names of functions as people read them, from names that a guest chose.
//!
//! A mangled name of a few hundred bytes can stand for one of any length, because its parts may refer to
//! others. So no more is written than is kept.

use std::fmt::{self, Write};

use cpp_demangle::{BorrowedSymbol, DemangleOptions};

/// Longest name that is kept, in bytes.
pub const MAX_NAME: usize = 1024;

/// `name` demangled if it is mangled, without what a terminal would act on, cut to [`MAX_NAME`].
pub fn readable(name: &str) -> String {
    let name = &name[..name.floor_char_boundary(MAX_NAME)];
    let plain = rust(name).or_else(|| cpp(name));
    plain.as_deref().unwrap_or(name).replace(char::is_control, "?")
}

fn rust(name: &str) -> Option<String> {
    let mut out = Bounded::default();
    let demangled = rustc_demangle::try_demangle(name).ok()?;
    // Without the hash.
    write!(out, "{demangled:#}").ok().map(|()| out.0)
}

fn cpp(name: &str) -> Option<String> {
    if !name.starts_with("_Z") {
        return None;
    }
    let symbol = BorrowedSymbol::new(name.as_bytes()).ok()?;
    let mut out = Bounded::default();
    symbol
        .structured_demangle(&mut out, &DemangleOptions::default())
        .ok()
        .map(|()| out.0)
}

/// Text of at most [`MAX_NAME`] bytes; writing more fails.
#[derive(Default)]
struct Bounded(String);

impl Write for Bounded {
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

    /// Each part is the one before it twice: 2^60 times `a`, were it written out.
    #[test]
    fn a_name_that_stands_for_an_endless_one_stays_as_it_is() {
        let mut name = "_Z1fI1aE".to_owned();
        // Each part adds two to what can be referred to, itself the second.
        for n in 0..17 {
            let of = char::from_digit(2 * n, 36).unwrap().to_ascii_uppercase();
            name.push_str(&format!("1xIS{of}_S{of}_E"));
        }
        assert_eq!(readable(&name), name);
    }

    proptest! {
        #[test]
        fn no_name_makes_it_panic(name in "(_Z|_R)?[A-Za-z0-9_$.]{0,300}") {
            prop_assert!(readable(&name).len() <= MAX_NAME);
        }
    }
}
