//! Counts of what goes on whether or not an event is on: only what is gained while it is on is the event's.

/// The spans in which an event was on, and what its source gained in them.
#[derive(Debug, Default)]
pub(super) struct Spans {
    /// The source when the present span began.
    start: Option<u64>,
    /// What spans that have ended gained.
    ended: u64,
    /// A source that goes back, or cannot be read any more, takes nothing away.
    last: u64,
}

impl Spans {
    /// Begins a span if none is under way. `source` reads the source.
    pub fn begin<E>(&mut self, source: impl FnOnce() -> Result<u64, E>) -> Result<(), E> {
        if self.start.is_none() {
            self.start = Some(source()?);
        }
        Ok(())
    }

    /// Ends the span.
    pub fn end(&mut self, source: impl FnOnce() -> Option<u64>) {
        self.ended = self.count(source);
        self.start = None;
    }

    /// What all spans have gained so far. Without a reading of the source the count stands still.
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
    fn only_what_is_gained_in_spans_counts() {
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
