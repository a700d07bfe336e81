//! Events that count the increase of a source while the event is active. The source itself always
//! advances.

/// Count of an event that is the increase of a source during the spans in which the event was
/// active.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// Value of the source at the start of the current span, or `None` while the event is not
    /// active.
    start: Option<u64>,
    /// Increase of the source during all finished spans.
    ended: u64,
    /// Count that was last returned. The count never decreases, even if the source decreases or
    /// cannot be read.
    last: u64,
}

impl Spans {
    /// Begins a span unless the event is already active. `source` returns the current value of the
    /// source.
    pub fn begin<E>(&mut self, source: impl FnOnce() -> Result<u64, E>) -> Result<(), E> {
        if self.start.is_none() {
            self.start = Some(source()?);
        }
        Ok(())
    }

    /// Ends the current span, if there is one.
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
