//! Doubly linked lists through a table of entries: constant-time insertion and removal, no allocation.

/// The end of a list.
const NIL: u32 = u32::MAX;

/// An entry's place in one list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    prev: u32,
    next: u32,
}

impl Link {
    pub(super) const NONE: Self = Self { prev: NIL, next: NIL };
}

/// One list. Its links live in the entries; `link` says where.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    head: u32,
    tail: u32,
    len: usize,
}

impl List {
    pub(super) const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
        len: 0,
    };

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn front(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub(super) fn after<E>(&self, entries: &[E], key: u32, link: impl Fn(&E) -> &Link) -> Option<u32> {
        let next = link(&entries[key as usize]).next;
        (next != NIL).then_some(next)
    }

    /// Appends `key`, which is not in this list.
    pub(super) fn push_back<E>(&mut self, entries: &mut [E], key: u32, link: impl Fn(&mut E) -> &mut Link) {
        *link(&mut entries[key as usize]) = Link {
            prev: self.tail,
            next: NIL,
        };
        if self.tail == NIL {
            self.head = key;
        } else {
            link(&mut entries[self.tail as usize]).next = key;
        }
        self.tail = key;
        self.len += 1;
    }

    /// Takes out `key`, which is in this list.
    pub(super) fn remove<E>(&mut self, entries: &mut [E], key: u32, link: impl Fn(&mut E) -> &mut Link) {
        let Link { prev, next } = std::mem::replace(link(&mut entries[key as usize]), Link::NONE);
        if prev == NIL {
            self.head = next;
        } else {
            link(&mut entries[prev as usize]).next = next;
        }
        if next == NIL {
            self.tail = prev;
        } else {
            link(&mut entries[next as usize]).prev = prev;
        }
        self.len -= 1;
    }
}
