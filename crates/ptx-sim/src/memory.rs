//! Device memory: allocations with gaps between them, never at an address used before, and one bit per byte that says
//! whether anything wrote it. Device `d` owns the addresses from `(d + 1) << 40` on; every device may access all.

use crate::bits::ByteBits;
use crate::config::DeviceId;
use crate::race::Shadow;
use crate::trap::{MemoryError, Stop, TrapKind};

/// The first multicast address, above every device's memory.
const MULTICAST_BASE: u64 = 1 << 60;
/// Alignment of allocations, and the least gap between two.
const GRANULE: u64 = 256;
/// What bytes that nothing wrote look like to the host.
pub const POISON: u8 = 0xCB;

/// The first address of a device.
pub(crate) fn device_base(device: u32) -> u64 {
    (u64::from(device) + 1) << 40
}

/// One allocation.
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) len: u64,
    freed: bool,
    pub(crate) data: Vec<u8>,
    init: ByteBits,
    /// Who accessed what since the machine was last idle.
    pub(crate) shadow: Shadow,
}

struct DeviceMemory {
    /// Ascending by address.
    allocations: Vec<Allocation>,
    next: u64,
    live: u64,
}

/// One range of memory on each of several devices, under an address of its own.
struct MulticastObject {
    base: u64,
    len: u64,
    /// First byte on each device.
    members: Vec<u64>,
}

/// Where an access lies: device, allocation, byte offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    device: u32,
    allocation: u32,
    pub(crate) offset: usize,
}

impl Place {
    /// The device that owns the memory.
    #[inline]
    pub(crate) fn device(&self) -> DeviceId {
        DeviceId(self.device)
    }
}

/// The memory of all devices.
pub(crate) struct GlobalMemory {
    devices: Vec<DeviceMemory>,
    /// Ascending by address.
    multicasts: Vec<MulticastObject>,
    capacity: u64,
    /// The allocation that the last access hit: most accesses of a warp fall into one.
    recent: (u64, u64, u32, u32),
}

impl GlobalMemory {
    pub(crate) fn new(devices: usize, capacity: u64) -> GlobalMemory {
        let devices = (0..devices as u32)
            .map(|d| DeviceMemory { allocations: Vec::new(), next: device_base(d) + GRANULE, live: 0 })
            .collect();
        GlobalMemory { devices, multicasts: Vec::new(), capacity, recent: (1, 0, 0, 0) }
    }

    /// Reserves `bytes` (0 is a valid, inaccessible allocation).
    pub(crate) fn alloc(&mut self, device: DeviceId, bytes: u64) -> Result<u64, MemoryError> {
        let capacity = self.capacity;
        let memory = self.devices.get_mut(device.0 as usize).ok_or(MemoryError::NoDevice(device.0))?;
        let free = capacity - memory.live;
        if bytes > free {
            return Err(MemoryError::OutOfMemory { device: device.0, requested: bytes, free, capacity });
        }
        let base = memory.next;
        // At least one granule of nobody's bytes follows.
        memory.next = (base + bytes).next_multiple_of(GRANULE) + GRANULE;
        memory.live += bytes;
        memory.allocations.push(Allocation {
            base,
            len: bytes,
            freed: false,
            data: vec![0; bytes as usize],
            init: ByteBits::new(bytes as usize),
            shadow: Shadow::new(),
        });
        Ok(base)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), MemoryError> {
        let (device, index) = self.find(address).ok_or(MemoryError::NotAllocated(address))?;
        let memory = &mut self.devices[device as usize];
        let allocation = &mut memory.allocations[index as usize];
        if allocation.base != address {
            return Err(MemoryError::NotAllocated(address));
        }
        if allocation.freed {
            return Err(MemoryError::Freed(address));
        }
        allocation.freed = true;
        allocation.data = Vec::new();
        allocation.init = ByteBits::default();
        allocation.shadow = Shadow::new();
        memory.live -= allocation.len;
        self.recent = (1, 0, 0, 0);
        Ok(())
    }

    /// A multicast address for `len` bytes from each of `members` on, which are on different devices.
    pub(crate) fn multicast(&mut self, members: &[u64], len: u64) -> Result<u64, MemoryError> {
        for (i, &address) in members.iter().enumerate() {
            self.host_place(address, len)?;
            let device = |address: u64| address >> 40;
            if !address.is_multiple_of(GRANULE) || members[..i].iter().any(|other| device(*other) == device(address)) {
                return Err(MemoryError::NotMulticast(address));
            }
        }
        let base = self.multicasts.last().map_or(MULTICAST_BASE, |last| last.base + last.len);
        let base = (base + GRANULE).next_multiple_of(GRANULE);
        self.multicasts.push(MulticastObject { base, len, members: members.to_vec() });
        Ok(base)
    }

    /// The addresses of a kernel's access to a multicast object on every device.
    pub(crate) fn multicast_members(&self, address: u64, size: u64) -> Result<Vec<u64>, Box<Stop>> {
        let after = self.multicasts.partition_point(|object| object.base <= address);
        let object = after.checked_sub(1).map(|at| &self.multicasts[at]);
        match object {
            Some(MulticastObject { base, len, members }) if address - base < *len && size <= len - (address - base) => {
                Ok(members.iter().map(|member| member + (address - base)).collect())
            }
            _ => {
                let message = format!("{size}-byte multicast store outside every multicast object");
                Err(Stop::new(TrapKind::OutOfBounds, message).address(address))
            }
        }
    }

    /// The last allocation at or below `address`.
    fn find(&self, address: u64) -> Option<(u32, u32)> {
        let device = (address >> 40).checked_sub(1)? as usize;
        let allocations = &self.devices.get(device)?.allocations;
        let after = allocations.partition_point(|a| a.base <= address);
        Some((device as u32, after.checked_sub(1)? as u32))
    }

    /// The place of a kernel's access, which must lie inside one live allocation.
    #[inline]
    pub(crate) fn place(&mut self, address: u64, size: u64) -> Result<Place, Box<Stop>> {
        let (base, len, device, allocation) = self.recent;
        if let Some(offset) = address.checked_sub(base)
            && offset < len
            && size <= len - offset
        {
            return Ok(Place { device, allocation, offset: offset as usize });
        }
        self.place_slow(address, size)
    }

    #[cold]
    fn place_slow(&mut self, address: u64, size: u64) -> Result<Place, Box<Stop>> {
        let Some((device, index)) = self.find(address) else {
            let what = match address {
                0..0x1_0000 => "near-null address",
                MULTICAST_BASE.. => "multicast address, which only multicast instructions may use",
                _ => "address of no allocation",
            };
            return Err(Stop::new(TrapKind::OutOfBounds, format!("{size}-byte access at {what}")).address(address));
        };
        let a = &self.devices[device as usize].allocations[index as usize];
        let offset = address - a.base;
        let whose = format!("the {}-byte buffer at {:#x} of device {device}", a.len, a.base);
        if offset >= a.len || size > a.len - offset {
            let past = (offset + size).saturating_sub(a.len);
            let message = format!("{size}-byte access {offset} bytes into {whose}: {past} bytes past its end");
            return Err(Stop::new(TrapKind::OutOfBounds, message).address(address));
        }
        if a.freed {
            let message = format!("{size}-byte access {offset} bytes into {whose}, which was freed");
            return Err(Stop::new(TrapKind::Freed, message).address(address));
        }
        self.recent = (a.base, a.len, device, index);
        Ok(Place { device, allocation: index, offset: offset as usize })
    }

    #[inline(always)]
    pub(crate) fn at(&self, place: Place) -> &Allocation {
        &self.devices[place.device as usize].allocations[place.allocation as usize]
    }

    #[inline(always)]
    pub(crate) fn at_mut(&mut self, place: Place) -> &mut Allocation {
        &mut self.devices[place.device as usize].allocations[place.allocation as usize]
    }

    /// Forgets who accessed what: everything so far happened before whatever comes.
    pub(crate) fn clear_shadows(&mut self) {
        for memory in &mut self.devices {
            memory.allocations.iter_mut().for_each(|a| a.shadow.clear());
        }
    }

    /// Reads `out.len()` bytes that must all be initialised.
    pub(crate) fn read_checked(&mut self, address: u64, out: &mut [u8]) -> Result<(), Box<Stop>> {
        if out.is_empty() {
            return Ok(());
        }
        let place = self.place(address, out.len() as u64)?;
        let a = self.at(place);
        let range = place.offset..place.offset + out.len();
        if let Some(at) = a.init.find(range.clone(), false) {
            return Err(a.uninitialized(at));
        }
        out.copy_from_slice(&a.data[range]);
        Ok(())
    }

    /// Writes bytes and marks them initialised.
    pub(crate) fn write_checked(&mut self, address: u64, bytes: &[u8]) -> Result<(), Box<Stop>> {
        if bytes.is_empty() {
            return Ok(());
        }
        let place = self.place(address, bytes.len() as u64)?;
        let a = self.at_mut(place);
        let range = place.offset..place.offset + bytes.len();
        a.data[range.clone()].copy_from_slice(bytes);
        a.init.fill(range, true);
        Ok(())
    }

    fn host_place(&self, address: u64, len: u64) -> Result<Place, MemoryError> {
        let outside = MemoryError::OutOfBounds { address, len };
        let (device, allocation) = self.find(address).ok_or_else(|| outside.clone())?;
        let a = &self.devices[device as usize].allocations[allocation as usize];
        let offset = address - a.base;
        if a.freed && offset <= a.len {
            return Err(MemoryError::Freed(a.base));
        }
        if offset > a.len || len > a.len - offset {
            return Err(outside);
        }
        Ok(Place { device, allocation, offset: offset as usize })
    }

    /// Whether a host command may touch the range.
    pub(crate) fn check_host(&self, address: u64, len: u64) -> Result<(), MemoryError> {
        self.host_place(address, len).map(|_| ())
    }

    /// Host write: the bytes become initialised.
    pub(crate) fn host_write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let place = self.host_place(address, bytes.len() as u64)?;
        let a = self.at_mut(place);
        let range = place.offset..place.offset + bytes.len();
        a.data[range.clone()].copy_from_slice(bytes);
        a.init.fill(range, true);
        Ok(())
    }

    /// Host fill: the bytes become initialised.
    pub(crate) fn host_fill(&mut self, address: u64, len: u64, byte: u8) -> Result<(), MemoryError> {
        let place = self.host_place(address, len)?;
        let a = self.at_mut(place);
        let range = place.offset..place.offset + len as usize;
        a.data[range.clone()].fill(byte);
        a.init.fill(range, true);
        Ok(())
    }

    /// Copy of bytes and of whether they are initialised; the ranges may overlap.
    pub(crate) fn host_copy(&mut self, dst: u64, src: u64, len: u64) -> Result<(), MemoryError> {
        let (from, to) = (self.host_place(src, len)?, self.host_place(dst, len)?);
        let n = len as usize;
        let a = self.at(from);
        let bytes = a.data[from.offset..from.offset + n].to_vec();
        let holes: Vec<usize> = {
            let mut holes = Vec::new();
            let (mut at, end) = (from.offset, from.offset + n);
            while let Some(hole) = a.init.find(at..end, false) {
                let next = a.init.find(hole..end, true).unwrap_or(end);
                holes.extend([hole - from.offset, next - from.offset]);
                at = next;
            }
            holes
        };
        let b = self.at_mut(to);
        b.data[to.offset..to.offset + n].copy_from_slice(&bytes);
        b.init.fill(to.offset..to.offset + n, true);
        for hole in holes.chunks_exact(2) {
            b.init.fill(to.offset + hole[0]..to.offset + hole[1], false);
        }
        Ok(())
    }

    /// Host read; bytes that nothing wrote read as [`POISON`].
    pub(crate) fn host_read(&self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        let place = self.host_place(address, out.len() as u64)?;
        let a = self.at(place);
        let (mut at, end) = (place.offset, place.offset + out.len());
        out.copy_from_slice(&a.data[at..end]);
        while let Some(hole) = a.init.find(at..end, false) {
            let next = a.init.find(hole..end, true).unwrap_or(end);
            out[hole - place.offset..next - place.offset].fill(POISON);
            at = next;
        }
        Ok(())
    }
}

impl Allocation {
    #[cold]
    fn uninitialized(&self, offset: usize) -> Box<Stop> {
        let message =
            format!("read of byte {offset} of the {}-byte buffer at {:#x}, which nothing wrote", self.len, self.base);
        Stop::new(TrapKind::Uninitialized, message).address(self.base + offset as u64)
    }

    /// Reads an aligned access of 1 to 16 bytes.
    #[inline(always)]
    pub(crate) fn load(&self, offset: usize, size: usize) -> Result<u128, Box<Stop>> {
        if !self.init.all_small(offset, size) {
            let at = self.init.find(offset..offset + size, false).unwrap_or(offset);
            return Err(self.uninitialized(at));
        }
        Ok(load_le(&self.data[offset..offset + size]))
    }

    /// Writes an aligned access of 1 to 16 bytes; whether any byte changed.
    #[inline(always)]
    pub(crate) fn store(&mut self, offset: usize, size: usize, value: u128) -> bool {
        let changed = !self.init.all_small(offset, size);
        self.init.set_small(offset, size);
        store_le(&mut self.data[offset..offset + size], value) || changed
    }
}

/// Little-endian value of 1, 2, 4, 8 or 16 bytes.
#[inline(always)]
pub(crate) fn load_le(bytes: &[u8]) -> u128 {
    match *bytes {
        [a] => a.into(),
        [a, b] => u16::from_le_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]).into(),
        _ => u128::from_le_bytes(bytes.try_into().expect("accesses have 1, 2, 4, 8 or 16 bytes")),
    }
}

/// Stores the low bytes of `value`; whether any byte changed.
#[inline(always)]
pub(crate) fn store_le(target: &mut [u8], value: u128) -> bool {
    let old = load_le(target);
    let n = target.len();
    target.copy_from_slice(&value.to_le_bytes()[..n]);
    let mask = if n == 16 { u128::MAX } else { (1 << (8 * n)) - 1 };
    old != value & mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_aligned_apart_and_never_reused() {
        let mut m = GlobalMemory::new(2, 1 << 20);
        let a = m.alloc(DeviceId(0), 100).unwrap();
        let b = m.alloc(DeviceId(0), 1).unwrap();
        let c = m.alloc(DeviceId(1), 256).unwrap();
        assert!(a.is_multiple_of(256) && b >= a + 100 + 256 && c >> 40 == 2);
        m.free(a).unwrap();
        assert_eq!(m.free(a), Err(MemoryError::Freed(a)));
        assert_eq!(m.free(b + 1), Err(MemoryError::NotAllocated(b + 1)));
        assert!(m.alloc(DeviceId(0), 100).unwrap() > b);
        assert!(matches!(m.alloc(DeviceId(0), 1 << 20), Err(MemoryError::OutOfMemory { .. })));
        assert_eq!(m.alloc(DeviceId(2), 1), Err(MemoryError::NoDevice(2)));
    }

    #[test]
    fn faults_say_what_is_wrong() {
        let mut m = GlobalMemory::new(1, 1 << 20);
        let a = m.alloc(DeviceId(0), 100).unwrap();
        assert_eq!(m.place(a + 98, 4).unwrap_err().kind, TrapKind::OutOfBounds);
        assert_eq!(m.place(0, 4).unwrap_err().kind, TrapKind::OutOfBounds);
        assert_eq!(m.place(a - 4, 4).unwrap_err().kind, TrapKind::OutOfBounds);
        let p = m.place(a + 96, 4).unwrap();
        assert_eq!(m.at(p).load(96, 4).unwrap_err().kind, TrapKind::Uninitialized);
        assert!(m.at_mut(p).store(96, 4, 0));
        assert!(!m.at_mut(p).store(96, 4, 0));
        assert_eq!(m.at(p).load(96, 4).unwrap(), 0);
        m.free(a).unwrap();
        assert_eq!(m.place(a, 4).unwrap_err().kind, TrapKind::Freed);
    }

    #[test]
    fn host_copies_keep_what_is_uninitialised() {
        let mut m = GlobalMemory::new(1, 1 << 20);
        let a = m.alloc(DeviceId(0), 64).unwrap();
        let b = m.alloc(DeviceId(0), 64).unwrap();
        m.host_write(a + 4, &[1, 2]).unwrap();
        m.host_fill(b, 64, 9).unwrap();
        m.host_copy(b, a, 16).unwrap();
        let mut out = [0; 20];
        m.host_read(b, &mut out).unwrap();
        let mut want = [POISON; 20];
        want[4..6].copy_from_slice(&[1, 2]);
        want[16..].fill(9);
        assert_eq!(out, want);
        assert!(m.host_write(a + 63, &[0, 0]).is_err());
        assert!(m.host_read(a + 64, &mut []).is_ok());
    }
}
