//! Session tokens of version 2: random numbers in a bounded table.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustix::rand::{GetRandomFlags, getrandom};

/// Minimum lifetime of a session token, in seconds.
pub const MIN_TTL_S: u32 = 1;
/// Maximum lifetime of a session token, in seconds.
pub const MAX_TTL_S: u32 = 21_600;
/// Maximum number of valid tokens. A further token replaces the oldest.
pub const MAX_TOKENS: usize = 4096;
/// Size of a token, in bytes.
const TOKEN_BYTES: usize = 24;

/// Error returned when no token can be issued.
#[derive(Debug, thiserror::Error)]
pub enum MmdsTokenError {
    /// The requested lifetime is out of range.
    #[error(
        "Invalid time to live value provided for token: {0}. Please provide a value between \
         {MIN_TTL_S} and {MAX_TTL_S}."
    )]
    Lifetime(u32),
    /// The host cannot provide random numbers.
    #[error("Cannot generate a token.")]
    Random(#[source] io::Error),
}

#[derive(Clone, Debug)]
struct SessionToken {
    bytes: [u8; TOKEN_BYTES],
    expires: Instant,
}

/// The valid session tokens of a VM.
#[derive(Clone, Debug, Default)]
pub struct MmdsTokenTable {
    tokens: VecDeque<SessionToken>,
}

impl MmdsTokenTable {
    /// Issues a token that is valid for `ttl_s` seconds from `now`.
    ///
    /// # Errors
    /// Returns [`MmdsTokenError::Lifetime`] if `ttl_s` is out of range, and
    /// [`MmdsTokenError::Random`] with the error of `getrandom(2)`.
    pub fn issue(&mut self, ttl_s: u32, now: Instant) -> Result<String, MmdsTokenError> {
        if !(MIN_TTL_S..=MAX_TTL_S).contains(&ttl_s) {
            return Err(MmdsTokenError::Lifetime(ttl_s));
        }
        let mut bytes = [0; TOKEN_BYTES];
        let filled = getrandom(&mut bytes, GetRandomFlags::empty());
        let filled = filled.map_err(|e| MmdsTokenError::Random(e.into()))?;
        if filled != TOKEN_BYTES {
            return Err(MmdsTokenError::Random(io::ErrorKind::UnexpectedEof.into()));
        }
        self.tokens.retain(|token| now < token.expires);
        if self.tokens.len() >= MAX_TOKENS {
            self.tokens.pop_front();
        }
        let expires = now + Duration::from_secs(ttl_s.into());
        self.tokens.push_back(SessionToken { bytes, expires });
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Returns whether `token` was issued and is valid at `now`.
    pub fn is_valid(&self, token: &[u8], now: Instant) -> bool {
        let mut bytes = [0; TOKEN_BYTES];
        URL_SAFE_NO_PAD.decode_slice(token, &mut bytes) == Ok(TOKEN_BYTES)
            && self
                .tokens
                .iter()
                .any(|token| token.bytes == bytes && now < token.expires)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_valid_until_it_expires() {
        let mut table = MmdsTokenTable::default();
        let now = Instant::now();
        let token = table.issue(2, now).unwrap();
        let other = table.issue(MAX_TTL_S, now).unwrap();
        assert_ne!(token, other);
        let at = |ms| now + Duration::from_millis(ms);
        assert!(table.is_valid(token.as_bytes(), at(1999)));
        assert!(!table.is_valid(token.as_bytes(), at(2000)));
        assert!(table.is_valid(other.as_bytes(), at(2000)));
        for wrong in ["", "x", &token[1..], &format!("{other}A"), &"A".repeat(32)] {
            assert!(!table.is_valid(wrong.as_bytes(), now), "{wrong}");
        }
        for ttl in [0, MAX_TTL_S + 1, u32::MAX] {
            assert!(matches!(table.issue(ttl, now), Err(MmdsTokenError::Lifetime(_))));
        }
    }

    #[test]
    fn table_is_bounded_and_forgets_expired_tokens() {
        let mut table = MmdsTokenTable::default();
        let now = Instant::now();
        let first = table.issue(100, now).unwrap();
        for _ in 0..MAX_TOKENS {
            table.issue(100, now).unwrap();
        }
        assert_eq!(table.tokens.len(), MAX_TOKENS);
        assert!(!table.is_valid(first.as_bytes(), now));
        table.issue(1, now + Duration::from_secs(100)).unwrap();
        assert_eq!(table.tokens.len(), 1);
    }
}
