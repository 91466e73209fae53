//! Many tensors from one rank to all, as a few large ones.

use std::collections::VecDeque;

use super::Param;
use super::bucket::allocate;
use super::buckets::{Assignment, assign_by_size};
use crate::fault::Result;
use crate::work::Work;
use crate::{Buffer, BufferView, Group, Rank};

/// Bytes that DDP broadcasts in one call.
pub const BROADCAST_BYTES: usize = 250 << 20;

/// Flat tensors under way: one travels while the next is packed.
const UNDER_WAY: usize = 2;

/// The root's tensors on all ranks, in place. They travel by dtype, in flat pieces that are full at `buffer_size` bytes.
///
/// ```
/// # use tenfold::{Group, Buffer, ddp};
/// Group::threads(2, |group| {
///     let mut model = [Buffer::from_slice(&[group.rank() as f32; 3]), Buffer::from_slice(&[1.0_f32])];
///     let views = model.iter_mut().map(Buffer::lend).collect();
///     ddp::broadcast_coalesced(&group, views, 0, ddp::BROADCAST_BYTES)?;
///     assert_eq!(model[0].as_slice::<f32>(), [0.0; 3]);
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
///
/// # Errors
/// If `root` is out of range, ranks give different tensors, or the group fails.
pub fn broadcast_coalesced(
    group: &Group,
    tensors: Vec<BufferView>,
    root: Rank,
    buffer_size: usize,
) -> Result<()> {
    let params: Vec<Param> =
        tensors.iter().map(|tensor| Param::new("", &[tensor.elements()], tensor.dtype())).collect();
    let mut under_way: VecDeque<(Work, Buffer, Assignment)> = VecDeque::new();
    for piece in assign_by_size(&params, &[buffer_size.max(1)], None) {
        if under_way.len() == UNDER_WAY
            && let Some(first) = under_way.pop_front()
        {
            unpack(first, &tensors, group.rank() == root)?;
        }
        let elements = piece.params.iter().map(|number| tensors[*number].elements()).sum();
        let mut flat = allocate(group, params[piece.params[0]].dtype, elements);
        let view = flat.lend();
        if group.rank() == root {
            each_part(&piece, &tensors, |tensor, from, to| tensor.pack(view.span().part(from, to)));
        }
        under_way.push_back((group.background().start_broadcast(view, root)?, flat, piece));
    }
    under_way.into_iter().try_for_each(|piece| unpack(piece, &tensors, group.rank() == root))
}

/// Waits for a piece, and copies it to its tensors; the root's have been there from the start, and may be read-only.
fn unpack(
    (work, mut flat, piece): (Work, Buffer, Assignment),
    tensors: &[BufferView],
    is_root: bool,
) -> Result<()> {
    work.wait()?;
    if is_root {
        return Ok(());
    }
    let view = flat.lend();
    each_part(&piece, tensors, |tensor, from, to| tensor.unpack(view.span().part(from, to).bytes()));
    Ok(())
}

fn each_part(piece: &Assignment, tensors: &[BufferView], action: impl Fn(&BufferView, usize, usize)) {
    let mut from = 0;
    for number in &piece.params {
        let to = from + tensors[*number].byte_len();
        action(&tensors[*number], from, to);
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn everybody_gets_the_roots_tensors_whatever_the_pieces() {
        for buffer_size in [0, 1, 10, 100, BROADCAST_BYTES] {
            let all = Group::threads(3, |group| {
                let rank = group.rank();
                let mut model: Vec<Buffer> = (1..20_usize)
                    .map(|number| match number % 3 {
                        0 => Buffer::from_slice(&vec![(number * 10 + rank) as i64; number]),
                        1 => Buffer::from_slice(&vec![(number * 10 + rank) as f32; number]),
                        _ => Buffer::zeros(DType::U8, 0),
                    })
                    .collect();
                let views = model.iter_mut().map(Buffer::lend).collect();
                broadcast_coalesced(&group, views, 1, buffer_size)?;
                for (number, tensor) in (1..20_usize).zip(&model) {
                    match number % 3 {
                        0 => assert_eq!(tensor.as_slice::<i64>(), vec![(number * 10 + 1) as i64; number]),
                        1 => assert_eq!(tensor.as_slice::<f32>(), vec![(number * 10 + 1) as f32; number]),
                        _ => {}
                    }
                }
                Ok(())
            });
            all.unwrap();
        }
    }

    #[test]
    fn a_root_that_does_not_exist_is_refused() {
        let error = Group::threads(1, |group| {
            let mut tensor = Buffer::from_slice(&[1.0_f32]);
            broadcast_coalesced(&group, vec![tensor.lend()], 3, 100)
        });
        assert_eq!(
            error.unwrap_err().to_string(),
            "broadcast in group `default` failed on rank 0 of 1: root 3 is out of range: ranks are 0 to 0"
        );
    }
}
