//! The mapping of the guest's kernel in a recording.

use guest_profile::export::KernelTextMap;
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;

/// Returns the mapping of the guest's kernel. `symbols` are the kernel's symbols with run-time
/// addresses. `build_id` is the build ID of the running kernel, if known.
pub(crate) fn kernel_map(symbols: &KernelSymbols, build_id: Option<BuildId>) -> Option<KernelTextMap> {
    let (name, start) = reference_symbol(symbols)?;
    let end = symbols.by_name("_etext").map(|s| s.address);
    let last = symbols.iter().map(|s| s.address).max()?.saturating_add(4096);
    Some(KernelTextMap {
        start,
        len: end.unwrap_or(last).saturating_sub(start),
        reference_symbol: name.to_owned(),
        reference_address: start,
        build_id: build_id.or_else(|| synthetic_build_id(symbols, start)),
    })
}

/// Returns a synthetic build ID for a kernel that has no build ID. The ID is a hash of the kernel's
/// symbols (FNV-1a, 128 bits) and is independent of the load address. Without a build ID, perf
/// would use the symbols of the host kernel.
fn synthetic_build_id(symbols: &KernelSymbols, start: u64) -> Option<BuildId> {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0100_0000_0000_0000_0000_013b;
    let hash = symbols.iter().fold(BASIS, |hash, symbol| {
        let offset = symbol.address.wrapping_sub(start).to_le_bytes();
        let bytes = offset.iter().chain(symbol.name.as_bytes());
        bytes.fold(hash, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
    });
    BuildId::new(&hash.to_le_bytes())
}

/// Returns the symbol that identifies the kernel's load address.
pub(crate) fn reference_symbol(symbols: &KernelSymbols) -> Option<(&'static str, u64)> {
    ["_text", "_stext"]
        .into_iter()
        .find_map(|name| Some((name, symbols.by_name(name)?.address)))
}
