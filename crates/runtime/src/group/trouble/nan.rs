//! What is not a number is not sent: c10d's `TORCH_DIST_NAN_CHECK`.
//!
//! After a reduction, a NaN of one rank is on all ranks, and it is not known where it came from. With the check, a call that
//! would send a NaN is refused on the rank that has it, before anything is sent. Received values are not checked.

use tenfold_memory::{Buffer, BufferView, Bytes, DType, Span};
use tenfold_plan::{Area, Kind};

use super::super::Group;
use super::super::submit::Request;
use crate::fault::{Fault, Result};
use crate::label::Label;

/// Bytes that are looked at in one go.
const CHUNK: usize = 4096;

impl Group {
    /// Refuses a collective whose input has a NaN in it.
    #[cold]
    pub(in crate::group) fn check_numbers(&self, label: &Label, request: &mut Request) -> Result<()> {
        let is_input = !(request.kind == Kind::Broadcast && self.rank() != request.root);
        let in_place = request.in_place;
        let Some(run) = &mut request.run else { return Ok(()) };
        let buffers = run.buffers();
        let views = if in_place { vec![buffers.view(0)] } else { buffers.views(Area::Input) };
        self.check_tensors(label, views.into_iter().filter(|_| is_input))
    }

    /// The same for tensors, as the caller counts them.
    pub(in crate::group) fn check_tensors<'a>(
        &self,
        label: &Label,
        tensors: impl Iterator<Item = &'a BufferView>,
    ) -> Result<()> {
        for (index, tensor) in tensors.enumerate() {
            if let Some(element) = find_nan(tensor) {
                let all = tensor.elements();
                let message =
                    format!("NaN found in input tensor {index}, which has it at element {element} of {all}");
                let hint = "nothing was sent; TORCH_DIST_NAN_CHECK asked for this check";
                return Err(self.error(*label, Fault::argument(message).hint(hint)));
            }
        }
        Ok(())
    }
}

/// The first element that is not a number, counted in the tensor's own order.
pub fn find_nan(tensor: &BufferView) -> Option<usize> {
    let dtype = tensor.dtype();
    if tensor.is_contiguous() {
        return find(dtype, tensor.bytes());
    }
    let mut packed = Buffer::zeros(dtype, tensor.elements());
    let view = packed.lend();
    tensor.pack(view.span());
    find(dtype, view.bytes())
}

fn find(dtype: DType, bytes: Bytes<'_>) -> Option<usize> {
    use DType::{Bool, I8, I16, I32, I64, U8, U16, U32, U64};
    if matches!(dtype, Bool | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64) {
        return None;
    }
    let size = dtype.size();
    let mut chunk = [0; CHUNK];
    for start in (0..bytes.len()).step_by(CHUNK) {
        let len = CHUNK.min(bytes.len() - start);
        Span::of(&mut chunk[..len]).copy_from(bytes.part(start, start + len));
        if let Some(element) = chunk[..len].chunks_exact(size).position(|element| is_nan(dtype, element)) {
            return Some(start / size + element);
        }
    }
    None
}

fn is_nan(dtype: DType, element: &[u8]) -> bool {
    let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]) & 0x7fff;
    let single = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).is_nan();
    let double = |bytes: &[u8]| {
        f64::from_bits(bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))).is_nan()
    };
    match dtype {
        DType::F32 => single(element),
        DType::F64 => double(element),
        DType::F16 => half(element) > 0x7c00,
        DType::BF16 => half(element) > 0x7f80,
        DType::F8E4M3FN => element[0] & 0x7f == 0x7f,
        DType::F8E5M2 => element[0] & 0x7f > 0x7c,
        DType::F8E4M3FNUZ | DType::F8E5M2FNUZ => element[0] == 0x80, // where negative zero would be
        DType::Complex64 => single(element) || single(&element[4..]),
        DType::Complex128 => double(&element[..8]) || double(&element[8..]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a NaN of each dtype that has one.
    const NANS: [(DType, &[u8]); 10] = [
        (DType::F32, &[0, 0, 0xc0, 0xff]),
        (DType::F64, &[1, 0, 0, 0, 0, 0, 0xf0, 0x7f]),
        (DType::F16, &[1, 0xfc]),
        (DType::BF16, &[0x81, 0x7f]),
        (DType::F8E4M3FN, &[0xff]),
        (DType::F8E5M2, &[0x7e]),
        (DType::F8E4M3FNUZ, &[0x80]),
        (DType::F8E5M2FNUZ, &[0x80]),
        (DType::Complex64, &[0, 0, 0, 0, 0, 0, 0xc0, 0x7f]),
        (DType::Complex128, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xf8, 0xff]),
    ];

    #[test]
    fn a_nan_is_found_wherever_it_lies() {
        for (dtype, nan) in NANS {
            for place in [0, 1, 4095, 4096, 5000] {
                let mut tensor = Buffer::zeros(dtype, 5001);
                assert_eq!(find_nan(&tensor.lend()), None, "{dtype}");
                tensor.as_mut_bytes()[place * dtype.size()..][..dtype.size()].copy_from_slice(nan);
                assert_eq!(find_nan(&tensor.lend()), Some(place), "{dtype}");
            }
        }
    }

    #[test]
    fn infinities_and_integers_are_numbers() {
        let infinities: [(DType, &[u8]); 5] = [
            (DType::F32, &[0, 0, 0x80, 0xff]),
            (DType::F64, &[0, 0, 0, 0, 0, 0, 0xf0, 0x7f]),
            (DType::F16, &[0, 0xfc]),
            (DType::BF16, &[0x80, 0x7f]),
            (DType::F8E5M2, &[0xfc]),
        ];
        for (dtype, infinity) in infinities {
            let mut tensor = Buffer::zeros(dtype, 1);
            tensor.as_mut_bytes().copy_from_slice(infinity);
            assert_eq!(find_nan(&tensor.lend()), None, "{dtype}");
        }
        let mut numbers = Buffer::from_slice(&[-1_i64; 10]);
        assert_eq!(find_nan(&numbers.lend()), None);
    }

    #[test]
    fn elements_that_lie_apart_are_counted_in_their_own_order() {
        let mut tensor = Buffer::from_slice(&[0.0, 1.0, f32::NAN, 3.0]);
        assert_eq!(find_nan(&tensor.lend_strided(0, &[2, 2], &[1, 2])), Some(1));
        assert_eq!(find_nan(&tensor.lend_strided(1, &[2], &[2])), None);
    }
}
