//! Doubly linked lists through a table of entries: constant-time insertion and removal, no allocation.

use super::GroupKey;

/// The end of a list.
const NIL: u32 = u32::MAX;

/// As links have it: half as long as a key.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the queue takes in keys of 32 bits only"
)]
fn short(key: GroupKey) -> u32 {
    usize::from(key) as u32
}

/// The key, if it is not the end of the list.
fn key(short: u32) -> Option<GroupKey> {
    (short != NIL).then(|| (short as usize).into())
}

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

    pub(super) fn front(&self) -> Option<GroupKey> {
        key(self.head)
    }

    pub(super) fn after<E>(
        &self,
        entries: &[E],
        group: GroupKey,
        link: impl Fn(&E) -> &Link,
    ) -> Option<GroupKey> {
        key(link(&entries[usize::from(group)]).next)
    }

    /// Appends `group`, which is not in this list.
    pub(super) fn push_back<E>(
        &mut self,
        entries: &mut [E],
        group: GroupKey,
        link: impl Fn(&mut E) -> &mut Link,
    ) {
        *link(&mut entries[usize::from(group)]) = Link {
            prev: self.tail,
            next: NIL,
        };
        if self.tail == NIL {
            self.head = short(group);
        } else {
            link(&mut entries[self.tail as usize]).next = short(group);
        }
        self.tail = short(group);
        self.len += 1;
    }

    /// Takes out `group`, which is in this list.
    pub(super) fn remove<E>(
        &mut self,
        entries: &mut [E],
        group: GroupKey,
        link: impl Fn(&mut E) -> &mut Link,
    ) {
        let Link { prev, next } = std::mem::replace(link(&mut entries[usize::from(group)]), Link::NONE);
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
