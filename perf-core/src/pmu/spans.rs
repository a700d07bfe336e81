//! Counts derived from a source that advances regardless of whether the event is active. An event
//! counts only the increase of the source while the event is active.

/// The spans of time in which an event was active, and the increase of its source during these
/// spans.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// Value of the source at the start of the current span.
    start: Option<u64>,
    /// Increase of the source during all finished spans.
    ended: u64,
    /// Last returned count. A source that decreases or becomes unreadable does not lower the count.
    last: u64,
}

impl Spans {
    /// Begins a span unless one is open. `source` returns the current value of the source.
    pub fn begin<E>(&mut self, source: impl FnOnce() -> Result<u64, E>) -> Result<(), E> {
        if self.start.is_none() {
            self.start = Some(source()?);
        }
        Ok(())
    }

    /// Ends the current span.
    pub fn end(&mut self, source: impl FnOnce() -> Option<u64>) {
        self.ended = self.count(source);
        self.start = None;
    }

    /// Returns the increase of the source during all spans so far. The count does not advance if
    /// the source cannot be read.
    pub fn count(&mut self, source: impl FnOnce() -> Option<u64>) -> u64 {
        if let Some(start) = self.start
            && let Some(now) = source()
        {
            self.last = self.last.max(self.ended + now.saturating_sub(start));
        }
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gain_within_spans_is_counted() {
        let mut spans = Spans::default();
        assert_eq!(spans.count(|| Some(7)), 0, "no span yet");
        spans.begin(|| Ok::<_, ()>(10)).unwrap();
        spans.begin(|| Ok::<_, ()>(100)).unwrap();
        assert_eq!(spans.count(|| Some(15)), 5);
        assert_eq!(spans.count(|| None), 5, "cannot be read");
        assert_eq!(spans.count(|| Some(3)), 5, "went back");
        spans.end(|| Some(20));
        assert_eq!(spans.count(|| Some(50)), 10, "between two");
        assert_eq!(spans.begin(|| Err(())), Err(()));
        assert_eq!(spans.count(|| Some(60)), 10, "none began");
        spans.begin(|| Ok::<_, ()>(60)).unwrap();
        assert_eq!(spans.count(|| Some(61)), 11);
        spans.end(|| None);
        assert_eq!(spans.count(|| None), 11);
    }
}
