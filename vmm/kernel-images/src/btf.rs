//! BTF, the compact type information of a Linux kernel. Provides the offsets of structure members.
//!
//! This reader supports the subset of `Documentation/bpf/btf.rst` that is needed for member
//! offsets: type records, struct and union members (including those of anonymous members), and the
//! variables of a data section. The bytes may come from guest memory, so every index and length is
//! checked.

use std::collections::HashMap;

use crate::le;

/// Error returned for unusable type information.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// The BTF header is missing, or has another version or byte order.
    #[error("not BTF version 1")]
    Header,
    /// A length field or a record extends beyond the end of the data.
    #[error("the BTF is truncated")]
    Truncated,
    /// The kind of a type record is unknown, so the length of the record is also unknown.
    #[error("unknown BTF type kind {0}")]
    Kind(u32),
    /// The names of all structs exceed the memory limit, as in a malicious table.
    #[error("the names of structs exceed {MAX_NAMES_BYTES} bytes")]
    Names,
}

const MAGIC: u16 = 0xEB9F;
const HEADER: usize = 24;

mod kind {
    pub const INT: u32 = 1;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
}

/// Maximum length of a type or member name, in bytes. A name without a terminator within this limit
/// is ignored.
const MAX_NAME: usize = 512;
/// Maximum total size of struct names, in bytes. Distribution kernels have about 250,000.
const MAX_NAMES_BYTES: usize = 8 << 20;
/// Maximum number of members visited per lookup of a member. A kernel's largest struct has several
/// hundred members, including those of its anonymous members. A malicious table can have 65,535
/// members in each of [`MAX_DEPTH`] levels.
const MAX_STEPS: u32 = 200_000;
/// Maximum depth of typedefs and of nested anonymous members.
const MAX_DEPTH: u32 = 8;

/// Parsed BTF type information of a kernel.
#[derive(Debug)]
pub struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Offset of each type's record in `types`, by type ID. ID 0 is `void`, which has no record.
    at: Vec<u32>,
    /// Type IDs of structs and unions, by name.
    composites: HashMap<Box<[u8]>, u32>,
}

struct Record {
    name: u32,
    kind: u32,
    vlen: usize,
    kflag: bool,
    size_or_type: u32,
    body: usize,
}

impl Btf {
    /// Parses a `.BTF` section.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "lengths in the section's header have 32 bits, and nothing lies behind them"
    )]
    pub fn parse(data: &[u8]) -> Result<Self, BtfError> {
        let word = |at: usize| le::u32_at(data, at).ok_or(BtfError::Header);
        let first = word(0)?;
        if first & 0xFFFF != u32::from(MAGIC) || (first >> 16) & 0xFF != 1 || (word(4)? as usize) < HEADER {
            return Err(BtfError::Header);
        }
        let header = word(4)? as usize;
        let part = |off: u32, len: u32| {
            let from = header.checked_add(off as usize)?;
            data.get(from..from.checked_add(len as usize)?)
        };
        let types = part(word(8)?, word(12)?).ok_or(BtfError::Truncated)?.to_vec();
        let strings = part(word(16)?, word(20)?).ok_or(BtfError::Truncated)?.to_vec();
        let mut btf = Self {
            types,
            strings,
            at: vec![u32::MAX],
            composites: HashMap::new(),
        };
        let (mut pos, mut names_bytes) = (0, 0);
        while pos < btf.types.len() {
            let record = btf.record(pos).ok_or(BtfError::Truncated)?;
            let extra = match record.kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * record.vlen,
                kind::ENUM | kind::FUNC_PROTO => 8 * record.vlen,
                1..=18 => 0,
                other => return Err(BtfError::Kind(other)),
            };
            if record.body + extra > btf.types.len() {
                return Err(BtfError::Truncated);
            }
            let id = btf.at.len() as u32;
            if matches!(record.kind, kind::STRUCT | kind::UNION) && record.name != 0 {
                let name: Box<[u8]> = btf.string(record.name).into();
                names_bytes += name.len();
                if names_bytes > MAX_NAMES_BYTES {
                    return Err(BtfError::Names);
                }
                btf.composites.entry(name).or_insert(id);
            }
            btf.at.push(pos as u32);
            pos = record.body + extra;
        }
        Ok(btf)
    }

    /// Returns the byte offset of a member in the struct or union `composite`. The member may be
    /// given as a path ("f_path.dentry"). Members of anonymous structs and unions belong to the
    /// enclosing type. Returns `None` if the member does not exist, if it is a bit field that is
    /// not byte-aligned, or if it is not found within `MAX_STEPS` members per path component.
    pub fn offset_of(&self, composite: &str, path: &str) -> Option<u64> {
        let mut id = *self.composites.get(composite.as_bytes())?;
        let mut bits = 0u64;
        for name in path.split('.') {
            let (offset, of) = self.member(id, name.as_bytes(), MAX_DEPTH, &mut { MAX_STEPS })?;
            bits = bits.checked_add(offset)?;
            id = of;
        }
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// Returns the size of the struct or union `composite`, in bytes.
    pub fn size_of(&self, composite: &str) -> Option<u64> {
        Some(u64::from(
            self.get(*self.composites.get(composite.as_bytes())?)?
                .size_or_type,
        ))
    }

    /// Returns the offset of a variable in a data section such as `.data..percpu`.
    pub fn variable(&self, section: &str, name: &str) -> Option<u64> {
        for &at in &self.at[1..] {
            let r = self.record(at as usize)?;
            if r.kind != kind::DATASEC || self.string(r.name) != section.as_bytes() {
                continue;
            }
            for i in 0..r.vlen {
                let var = self.get(self.word(r.body + 12 * i)?)?;
                if var.kind == kind::VAR && self.string(var.name) == name.as_bytes() {
                    return Some(u64::from(self.word(r.body + 12 * i + 4)?));
                }
            }
        }
        None
    }

    /// Returns the bit offset and the type ID of the member `name` in the struct or union with type
    /// ID `id`, which may also be a typedef or qualifier of one. Returns `None` if there is no such
    /// member, or if `depth` or `steps` is exhausted.
    fn member(&self, id: u32, name: &[u8], depth: u32, steps: &mut u32) -> Option<(u64, u32)> {
        let depth = depth.checked_sub(1)?;
        let r = self.get(id)?;
        match r.kind {
            kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                return self.member(r.size_or_type, name, depth, steps);
            }
            kind::STRUCT | kind::UNION => {}
            _ => return None,
        }
        (0..r.vlen).find_map(|i| {
            *steps = steps.checked_sub(1)?;
            let at = r.body + 12 * i;
            let (member_name, of, offset) = (self.word(at)?, self.word(at + 4)?, self.word(at + 8)?);
            let offset = u64::from(if r.kflag { offset & 0xFF_FFFF } else { offset });
            if self.string(member_name) == name {
                Some((offset, of))
            } else if member_name == 0 {
                let (inner, of) = self.member(of, name, depth, steps)?;
                Some((offset + inner, of))
            } else {
                None
            }
        })
    }

    fn get(&self, id: u32) -> Option<Record> {
        let at = *self.at.get(id as usize)?;
        self.record(at as usize)
    }

    fn record(&self, at: usize) -> Option<Record> {
        let info = self.word(at.checked_add(4)?)?;
        Some(Record {
            name: self.word(at)?,
            kind: (info >> 24) & 0x1F,
            vlen: (info & 0xFFFF) as usize,
            kflag: info >> 31 == 1,
            size_or_type: self.word(at + 8)?,
            body: at + 12,
        })
    }

    fn word(&self, at: usize) -> Option<u32> {
        le::u32_at(&self.types, at)
    }

    fn string(&self, at: u32) -> &[u8] {
        let rest = self.strings.get(at as usize..).unwrap_or_default();
        let rest = &rest[..rest.len().min(MAX_NAME)];
        &rest[..memchr::memchr(0, rest).unwrap_or(0)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a BTF section with struct outer { int a; union { struct inner in; int b; }; },
    /// struct inner { int x; int y; }, and one variable.
    fn sample() -> Vec<u8> {
        let strings = b"\0int\0outer\0inner\0a\0b\0in\0x\0y\0current\0.data..percpu\0";
        let s = |name: &str| {
            let name = [b"\0", name.as_bytes(), b"\0"].concat();
            memchr::memmem::find(strings, &name).unwrap() as u32 + 1
        };
        let mut t: Vec<u32> = Vec::new();
        let head = |name: u32, kind: u32, vlen: u32, size: u32| [name, kind << 24 | vlen, size];
        t.extend(head(s("int"), 1, 0, 4)); // type ID 1
        t.push(32);
        t.extend(head(s("inner"), 4, 2, 8)); // type ID 2
        t.extend([s("x"), 1, 0, s("y"), 1, 32]);
        t.extend(head(0, 5, 2, 8)); // type ID 3
        t.extend([s("in"), 2, 0, s("b"), 1, 0]);
        t.extend(head(s("outer"), 4, 2, 16)); // type ID 4
        t.extend([s("a"), 1, 0, 0, 3, 64]);
        t.extend(head(s("current"), 14, 0, 1)); // type ID 5
        t.push(1);
        t.extend(head(s(".data..percpu"), 15, 1, 64)); // type ID 6
        t.extend([5, 0x1c0, 8]);
        let types: Vec<u8> = t.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut out = Vec::new();
        for w in [
            0x0001_EB9F,
            24,
            0,
            types.len() as u32,
            types.len() as u32,
            strings.len() as u32,
        ] {
            out.extend_from_slice(&u32::to_le_bytes(w));
        }
        out.extend(types);
        out.extend(strings);
        out
    }

    #[test]
    fn members_are_found_through_anonymous_and_named_ones() {
        let btf = Btf::parse(&sample()).unwrap();
        assert_eq!(btf.offset_of("outer", "a"), Some(0));
        assert_eq!(btf.offset_of("outer", "b"), Some(8));
        assert_eq!(btf.offset_of("outer", "in.y"), Some(12));
        assert_eq!(btf.offset_of("outer", "none"), None);
        assert_eq!(btf.size_of("outer"), Some(16));
        assert_eq!(btf.variable(".data..percpu", "current"), Some(0x1c0));
        assert_eq!(btf.variable(".data", "current"), None);
    }

    #[test]
    fn btf_rejects_invalid_data() {
        assert_eq!(Btf::parse(b"ELF").unwrap_err(), BtfError::Header);
        let s = sample();
        assert_eq!(Btf::parse(&s[..s.len() - 1]).unwrap_err(), BtfError::Truncated);
    }

    /// Returns a BTF section with the given type records and strings.
    fn section(types: &[u32], strings: &[u8]) -> Vec<u8> {
        let (types_bytes, strings_bytes) = (types.len() as u32 * 4, strings.len() as u32);
        let header = [0x0001_EB9F, 24, 0, types_bytes, types_bytes, strings_bytes];
        let words = header.iter().chain(types).flat_map(|word| word.to_le_bytes());
        words.chain(strings.iter().copied()).collect()
    }

    /// The lookup of a member fails at the step limit if anonymous members are nested in eight
    /// levels and each level has the maximum number of members.
    #[test]
    fn btf_lookup_is_bounded_for_nested_anonymous_members() {
        const MEMBERS: u32 = 0xffff;
        let mut types = Vec::new();
        for level in 1..=MAX_DEPTH {
            let name = if level == 1 { 1 } else { 0 };
            types.extend([name, 4 << 24 | MEMBERS, 8]);
            for _ in 0..MEMBERS {
                types.extend([0, (level % MAX_DEPTH) + 1, 0]);
            }
        }
        let btf = Btf::parse(&section(&types, b"\0bomb\0")).unwrap();
        let id = btf.composites[&b"bomb"[..]];
        let mut steps = MAX_STEPS;
        assert_eq!(btf.member(id, b"none", MAX_DEPTH, &mut steps), None);
        assert_eq!(
            steps, 0,
            "it ends when the budget does, not after 65,535 to the 8th members"
        );
        assert_eq!(btf.offset_of("bomb", "none"), None);
    }

    /// The table of struct names uses little memory if names are unterminated, or if many names are
    /// suffixes of one long name.
    #[test]
    fn btf_bounds_memory_for_names() {
        let structs = |at: &dyn Fn(u32) -> u32, count: u32| -> Vec<u32> {
            (0..count).flat_map(|n| [at(n), 4 << 24, 0]).collect()
        };
        let endless = Btf::parse(&section(&structs(&|n| n + 1, 10_000), &[b'x'; 1 << 20])).unwrap();
        assert!(endless.composites.keys().all(|name| name.is_empty()));
        // Each name has almost the maximum length.
        let strings = [[b'x'; MAX_NAME - 1].as_slice(), &[0]].concat();
        let most = u32::try_from(MAX_NAMES_BYTES / (MAX_NAME - 2)).unwrap();
        let fits = section(&structs(&|_| 1, most), &strings);
        assert_eq!(Btf::parse(&fits).unwrap().composites.len(), 1);
        let more = section(&structs(&|_| 1, most + 1), &strings);
        assert_eq!(Btf::parse(&more).unwrap_err(), BtfError::Names);
    }

    proptest! {
        #[test]
        fn damage_never_panics(at in 0usize..400, with: u8) {
            let mut s = sample();
            let len = s.len();
            s[at % len] = with;
            if let Ok(btf) = Btf::parse(&s) {
                for m in ["a", "b", "in.x", "in.y.z"] {
                    let _ = btf.offset_of("outer", m);
                }
                let _ = btf.variable(".data..percpu", "current");
            }
        }
    }
}
