//! Typed keys of the objects in a context. Each type of object has its own key type, so that keys
//! cannot be mixed up.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use slab::Slab;

/// Key of a group in a context.
pub(crate) use crate::mux::MuxGroupKey;

/// An index into a [`Table`] with the type of the indexed object.
pub(crate) trait Key: Copy {
    fn new(index: usize) -> Self;
    fn index(self) -> usize;
}

macro_rules! keys {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub(crate) struct $name(usize);

            impl Key for $name {
                fn new(index: usize) -> Self {
                    Self(index)
                }

                fn index(self) -> usize {
                    self.0
                }
            }
        )*
    };
}

keys! {
    /// Key of an event in a context. The key of a removed event is reused, so a stored key must be
    /// checked with [`crate::context::Context::get`].
    EventKey;
    /// Key of the slot pool of one driver in a context.
    PoolId;
}

impl Key for MuxGroupKey {
    fn new(index: usize) -> Self {
        index.into()
    }

    fn index(self) -> usize {
        self.into()
    }
}

/// A map from keys to values with constant-time insertion and removal. The key of a removed value
/// is reused.
pub(crate) struct Table<K, T> {
    values: Slab<T>,
    key: PhantomData<K>,
}

impl<K, T> Default for Table<K, T> {
    fn default() -> Self {
        Self {
            values: Slab::new(),
            key: PhantomData,
        }
    }
}

impl<K: Key, T> Table<K, T> {
    pub fn len(&self) -> usize {
        self.values.len()
    }

    pub fn insert(&mut self, value: T) -> K {
        K::new(self.values.insert(value))
    }

    /// Removes and returns the value of `key`.
    ///
    /// # Panics
    ///
    /// Panics if `key` has no value.
    pub fn remove(&mut self, key: K) -> T {
        self.values.remove(key.index())
    }

    pub fn get(&self, key: K) -> Option<&T> {
        self.values.get(key.index())
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        self.values.get_mut(key.index())
    }

    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        self.values.iter().map(|(index, value)| (K::new(index), value))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut T)> {
        self.values
            .iter_mut()
            .map(|(index, value)| (K::new(index), value))
    }
}

impl<K: Key, T> Index<K> for Table<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        &self.values[key.index()]
    }
}

impl<K: Key, T> IndexMut<K> for Table<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        &mut self.values[key.index()]
    }
}

impl<K, T: fmt::Debug> fmt::Debug for Table<K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.fmt(f)
    }
}
