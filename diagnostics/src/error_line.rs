//! Formatting of an error and its sources as one line.

use std::error::Error;

/// Returns `error` and its sources as one line, separated by colons. Omits a source whose text is
/// already part of the line.
pub fn error_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(e) = source {
        let text = e.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        source = e.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{what}")]
    struct Outer {
        what: &'static str,
        #[source]
        source: io::Error,
    }

    #[test]
    fn error_line_omits_repeated_sources() {
        let line = |what| {
            let source = io::Error::other("no such thing");
            error_line(&Outer { what, source })
        };
        assert_eq!(line("opening x"), "opening x: no such thing");
        assert_eq!(line("opening x: no such thing"), "opening x: no such thing");
    }
}
