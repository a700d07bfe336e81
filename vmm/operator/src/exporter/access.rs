//! Access control of the exporter.
//!
//! Any user of the host can connect to a loopback address. The exporter finds the user who owns the
//! client's socket in `/proc/net/tcp`, and serves only its own user, root, and the users given by
//! `--allow-user`. With `--token-file`, the exporter also serves any client that presents the
//! token. On addresses other than loopback, the exporter serves only clients with the token. On a
//! Unix socket, the file permissions decide who is served.
//!
//! A malicious web page can make a name under its control resolve to this host (DNS rebinding), but
//! cannot choose the `Host` field. The field must therefore be an IP address, `localhost`, the
//! host's name, or a name given by `--allow-host`.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use control_api::peer;

use super::http::{HostHeader, HttpReply, HttpRequest};

/// Kernel files that list the TCP sockets of this network namespace (proc(5)).
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
/// States of a socket that is owned by a process: established, FIN-WAIT-1 and -2, CLOSE-WAIT
/// (`include/net/tcp_states.h`). The kernel shows sockets in TIME-WAIT as owned by root.
const OWNED_STATES: [u8; 4] = [1, 4, 5, 8];
/// Maximum length of a token, in bytes.
const MAX_TOKEN: u64 = 4096;
/// Minimum length of a token, in bytes.
const MIN_TOKEN: usize = 16;

/// Errors of the access rules.
#[derive(Debug, thiserror::Error)]
pub enum ExporterAccessRuleError {
    #[error("user '{0}': not found in /etc/passwd; use the numeric user ID")]
    User(String),
    #[error("--token-file {}: cannot be read", .0.display())]
    TokenFile(PathBuf, #[source] io::Error),
    #[error(
        "--token-file {}: must have one line of {MIN_TOKEN} to {MAX_TOKEN} printable ASCII characters without spaces",
        .0.display()
    )]
    Token(PathBuf),
}

/// The connection that a request arrived on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpConnectionOrigin {
    /// TCP connection.
    Tcp {
        peer: SocketAddr,
        /// Local address of the connection.
        local: SocketAddr,
    },
    /// Connection to the Unix socket, whose file permissions control access.
    Unix,
}

/// Rules that determine which clients the exporter serves.
#[derive(Clone, Debug, Default)]
pub struct AccessRules {
    users: Vec<u32>,
    hosts: Vec<String>,
    token: Option<String>,
}

impl AccessRules {
    /// Creates rules that serve the exporter's own user, root, `users`, and every client with the
    /// token in `token_file`. The `Host` field of a request may contain a name in `hosts` or a name
    /// of this host.
    ///
    /// # Errors
    /// Returns [`ExporterAccessRuleError`] if a user does not exist or the token file is unusable.
    pub fn new(
        users: &[String],
        hosts: &[String],
        token_file: Option<&Path>,
    ) -> Result<Self, ExporterAccessRuleError> {
        let mut uids = vec![0, peer::own_uid()];
        for user in users {
            uids.push(uid_of(user)?);
        }
        let mut names: Vec<String> = hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        names.push("localhost".to_owned());
        let own = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let own = own.trim().to_ascii_lowercase();
        if !own.is_empty() {
            names.extend(own.split_once('.').map(|(first, _)| first.to_owned()));
            names.push(own);
        }
        Ok(Self {
            users: uids,
            hosts: names,
            token: token_file.map(read_token).transpose()?,
        })
    }

    /// Decides whether `request` is served.
    ///
    /// # Errors
    /// Returns the reply that rejects the request.
    pub fn check(&self, request: &HttpRequest, origin: HttpConnectionOrigin) -> Result<(), HttpReply> {
        let HttpConnectionOrigin::Tcp { peer, local } = origin else {
            return Ok(());
        };
        if !self.knows_host(&request.host) {
            let why = "the Host field names another host; --allow-host serves it under that name";
            return Err(HttpReply::refusal(421, why));
        }
        if let Some(token) = &self.token {
            let sent = request.bearer.as_deref().unwrap_or_default();
            if is_same(sent.as_bytes(), token.as_bytes()) {
                return Ok(());
            }
        }
        if is_loopback(local) {
            return match owner_of(peer, local) {
                Ok(Some(uid)) if self.users.contains(&uid) => Ok(()),
                Ok(Some(uid)) => {
                    let why = format!("user {uid} may not read here; --allow-user serves further users");
                    Err(HttpReply::refusal(403, &why))
                }
                _ => Err(HttpReply::refusal(
                    403,
                    "the user of this connection is not known",
                )),
            };
        }
        match self.token {
            None => Ok(()),
            Some(_) => Err(HttpReply::refusal(
                401,
                "needs the token of --token-file as a bearer token",
            )),
        }
    }

    fn knows_host(&self, host: &HostHeader) -> bool {
        let name = match host {
            // Every browser sends the field.
            HostHeader::Absent => return true,
            HostHeader::Invalid => return false,
            HostHeader::Named(host) => host.to_ascii_lowercase(),
        };
        let (name, port) = match name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, port)) => return address.parse::<Ipv6Addr>().is_ok() && is_port(port),
            None => name.split_at(name.find(':').unwrap_or(name.len())),
        };
        is_port(port) && (name.parse::<Ipv4Addr>().is_ok() || self.hosts.iter().any(|known| known == name))
    }
}

/// Returns whether `text` can follow a host name, because it is empty or a colon and a port.
fn is_port(text: &str) -> bool {
    text.is_empty()
        || text
            .strip_prefix(':')
            .is_some_and(|port| port.is_empty() || port.parse::<u16>().is_ok())
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Compares two tokens in constant time. The duration therefore does not reveal a prefix of the
/// expected token.
fn is_same(sent: &[u8], token: &[u8]) -> bool {
    sent.len() == token.len() && sent.iter().zip(token).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// Returns the user ID of `user`, a number or a name in /etc/passwd.
///
/// # Errors
/// Returns [`ExporterAccessRuleError::User`] if the user does not exist.
pub fn uid_of(user: &str) -> Result<u32, ExporterAccessRuleError> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let uid = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(user)).then(|| fields.nth(1)?.parse().ok())?
    });
    uid.ok_or_else(|| ExporterAccessRuleError::User(user.to_owned()))
}

fn read_token(path: &Path) -> Result<String, ExporterAccessRuleError> {
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_TOKEN + 2).read_to_string(&mut text))
        .map_err(|e| ExporterAccessRuleError::TokenFile(path.to_owned(), e))?;
    let token = text.trim_end();
    let is_token = token.len() >= MIN_TOKEN
        && token.len() as u64 <= MAX_TOKEN
        && token.bytes().all(|b| b.is_ascii_graphic());
    is_token
        .then(|| token.to_owned())
        .ok_or_else(|| ExporterAccessRuleError::Token(path.to_owned()))
}

/// Returns the user who owns the socket at `address` that is connected to `other`. Returns `None`
/// if this host has no such socket.
///
/// # Errors
/// Returns the error of reading the kernel's socket tables.
fn owner_of(address: SocketAddr, other: SocketAddr) -> io::Result<Option<u32>> {
    for table in TABLES {
        let file = match File::open(table) {
            Ok(file) => BufReader::new(file),
            // The kernel has no IPv6.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for line in file.lines() {
            if let Some(uid) = parse_row(&line?).and_then(|row| row.owner(address, other)) {
                return Ok(Some(uid));
            }
        }
    }
    Ok(None)
}

/// A row of a kernel socket table.
#[derive(Debug, PartialEq, Eq)]
struct SocketRow {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    uid: u32,
    inode: u64,
}

impl SocketRow {
    fn owner(&self, address: SocketAddr, other: SocketAddr) -> Option<u32> {
        let is_it = is_same_address(self.local, address) && is_same_address(self.remote, other);
        (is_it && self.inode != 0 && OWNED_STATES.contains(&self.state)).then_some(self.uid)
    }
}

/// Compares addresses, treating IPv4-mapped IPv6 addresses as IPv4.
fn is_same_address(a: SocketAddr, b: SocketAddr) -> bool {
    (a.ip().to_canonical(), a.port()) == (b.ip().to_canonical(), b.port())
}

/// Parses a row of a kernel socket table: `sl local_address rem_address st tx:rx tr:when retrnsmt
/// uid timeout inode …`.
fn parse_row(line: &str) -> Option<SocketRow> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (parse_address(fields.next()?)?, parse_address(fields.next()?)?);
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let uid = fields.nth(3)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some(SocketRow {
        local,
        remote,
        state,
        uid,
        inode,
    })
}

/// Parses an address such as `0100007F:24F9`, which consists of words in the host's byte order and
/// a port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        u32::from_str_radix(address.get(at..at + 8)?, 16)
            .ok()
            .map(u32::to_ne_bytes)
    };
    let ip = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (n, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(n * 8)?);
            }
            IpAddr::from(bytes)
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn request(host: HostHeader, bearer: Option<&str>) -> HttpRequest {
        HttpRequest {
            head_only: false,
            path: "/metrics".into(),
            parameters: Vec::new(),
            host,
            bearer: bearer.map(str::to_owned),
        }
    }

    fn access(token: Option<&str>) -> AccessRules {
        AccessRules {
            users: vec![0, peer::own_uid()],
            hosts: vec!["localhost".into(), "host-1.example".into()],
            token: token.map(str::to_owned),
        }
    }

    #[test]
    fn hosts_are_addresses_or_known_names() {
        let access = access(None);
        let knows = |host: &str| access.knows_host(&HostHeader::Named(host.into()));
        for good in [
            "127.0.0.1:9465",
            "10.0.0.7",
            "[::1]:9465",
            "[fe80::1]",
            "localhost:9465",
            "LOCALHOST",
            "Host-1.example:80",
        ] {
            assert!(knows(good), "{good}");
        }
        for bad in [
            "attacker.example",
            "attacker.example:9465",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example",
            "127.0.0.1:x",
            "[::1]x",
            "[attacker.example]",
            "",
        ] {
            assert!(!knows(bad), "{bad}");
        }
        assert!(access.knows_host(&HostHeader::Absent) && !access.knows_host(&HostHeader::Invalid));
    }

    /// The owner of a connection's socket is found in the kernel's table, for both ends of the
    /// connection.
    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn connection_owner_is_found() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(at) else {
                eprintln!("SKIP: no {at} here");
                continue;
            };
            let local = listener.local_addr().unwrap();
            let client = TcpStream::connect(local).unwrap();
            let (_served, peer) = listener.accept().unwrap();
            assert_eq!(owner_of(peer, local).unwrap(), Some(peer::own_uid()));
            let origin = HttpConnectionOrigin::Tcp { peer, local };
            let mut access = access(None);
            access.check(&request(HostHeader::Absent, None), origin).unwrap();
            access.users = vec![peer::own_uid().wrapping_add(1)];
            let refused = access
                .check(&request(HostHeader::Absent, None), origin)
                .unwrap_err();
            assert_eq!(refused.status, 403);
            // The token replaces the user check.
            access.token = Some("0123456789abcdef".into());
            access
                .check(&request(HostHeader::Absent, Some("0123456789abcdef")), origin)
                .unwrap();
            drop(client);
        }
    }

    /// Sockets that belong to no process appear as root's in the kernel's table and must be
    /// ignored.
    #[test]
    fn unowned_sockets_are_ignored() {
        let row = |state: &str, inode: u32| {
            format!(
                "   3: 0100007F:9C40 0100007F:24F9 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0"
            )
        };
        let [a, b] = ["127.0.0.1:40000", "127.0.0.1:9465"].map(|text| text.parse().unwrap());
        let owner = |line: &str| parse_row(line).unwrap().owner(a, b);
        assert_eq!(owner(&row("01", 77)), Some(0));
        assert_eq!(owner(&row("06", 0)), None);
        assert_eq!(owner(&row("06", 77)), None);
        assert_eq!(owner(&row("01", 0)), None);
        assert_eq!(parse_row(&row("01", 77)).unwrap().owner(b, a), None);
        let mapped = "[::ffff:127.0.0.1]:40000".parse().unwrap();
        assert_eq!(parse_row(&row("01", 77)).unwrap().owner(mapped, b), Some(0));
        assert_eq!(parse_row("  sl  local_address rem_address   st"), None);
    }

    #[test]
    fn non_loopback_addresses_require_token() {
        let [peer, local] = ["10.0.0.9:40000", "10.0.0.7:9465"].map(|text| text.parse().unwrap());
        let origin = HttpConnectionOrigin::Tcp { peer, local };
        let status = |access: &AccessRules, bearer| {
            let host = HostHeader::Named("10.0.0.7:9465".into());
            access
                .check(&request(host, bearer), origin)
                .map_err(|reply| reply.status)
        };
        assert_eq!(status(&access(None), None), Ok(()));
        let with = access(Some("0123456789abcdef"));
        assert_eq!(status(&with, None), Err(401));
        assert_eq!(status(&with, Some("0123456789abcdeX")), Err(401));
        assert_eq!(status(&with, Some("0123456789abcdef")), Ok(()));
    }

    #[test]
    fn invalid_tokens_and_users_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        for (text, good) in [
            ("0123456789abcdef\n", true),
            ("short\n", false),
            ("0123456789 abcdef", false),
            ("", false),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(read_token(&path).is_ok(), good, "{text:?}");
        }
        assert!(matches!(
            read_token(&dir.path().join("none")),
            Err(ExporterAccessRuleError::TokenFile(..))
        ));
        assert_eq!(uid_of("1000").unwrap(), 1000);
        assert_eq!(uid_of("root").unwrap(), 0);
        assert!(uid_of("no such user").is_err());
    }
}
