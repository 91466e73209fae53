//! Walks over the tensors of a model, in the order in which its fields are defined: the same on all ranks.
//!
//! burn's walks are generic over the number of dimensions and cannot fail. Here a walk hands each tensor as a [`Found`] to a
//! closure, and stops calling it after the first error. [`agree`] then makes all ranks fail together.

use std::collections::VecDeque;

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::kind::Basic;
use burn_core::tensor::{Bool, DType, Element as BurnElement, Int, Tensor, TensorData};
use tenfold::ddp::{self, raw};
use tenfold::{Buffer, Element, Group, Rank};

use crate::tensors::{read, with_element};
use crate::{Error, Result};

/// A tensor of a model.
pub(crate) struct Found<'a> {
    pub(crate) id: ParamId,
    /// The fields that lead to it.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    /// It gets gradients.
    pub(crate) is_trained: bool,
    /// Its elements.
    pub(crate) data: &'a dyn Fn() -> Result<TensorData>,
}

impl Found<'_> {
    /// What tenfold has to know of it.
    pub(crate) fn describe(&self) -> Result<ddp::Param> {
        let dtype = with_element!(self.dtype, T => Ok::<_, Error>(<T as Element>::DTYPE));
        let dtype = dtype.map_err(|_| Error::DType(self.dtype, Some(self.name.clone())))?;
        Ok(ddp::Param::new(&self.name, &self.shape, dtype))
    }
}

/// Calls `each` with the tensors of a model: parameters, and what layers keep besides, such as running averages.
pub(crate) fn visit<M: Module>(model: &M, each: impl FnMut(Found<'_>) -> Result<()>) -> Result<()> {
    let mut walk = Walk { path: Vec::new(), each, outcome: Ok(()) };
    model.visit(&mut walk);
    walk.outcome
}

struct Walk<F> {
    path: Vec<String>,
    each: F,
    outcome: Result<()>,
}

impl<F: FnMut(Found<'_>) -> Result<()>> Walk<F> {
    fn found<const D: usize, K: Basic>(&mut self, id: ParamId, tensor: Tensor<D, K>, is_trained: bool) {
        if self.outcome.is_ok() {
            let (name, shape, dtype) = (self.path.join("."), tensor.dims().to_vec(), tensor.dtype());
            let data = || read(tensor.clone());
            self.outcome = (self.each)(Found { id, name, shape, dtype, is_trained, data: &data });
        }
    }
}

impl<F: FnMut(Found<'_>) -> Result<()>> ModuleVisitor for Walk<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found(param.id, param.base(), param.base().is_require_grad());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.found(param.id, param.base(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.found(param.id, param.base(), false);
    }
}

/// Puts other elements into the tensors of a model, in the order of [`visit`].
struct Fill {
    all: VecDeque<TensorData>,
}

impl Fill {
    fn next<const D: usize, K: Basic>(&mut self, tensor: &Tensor<D, K>) -> Tensor<D, K> {
        let data = self.all.pop_front().expect("a model is mapped in the order in which it is visited");
        Tensor::from_data(data, (&tensor.device(), tensor.dtype()))
    }
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| {
            let filled = self.next(&tensor);
            if tensor.is_require_grad() { filled.require_grad() } else { filled }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| self.next(&tensor))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|tensor| self.next(&tensor))
    }
}

/// The model with the values that rank `root` has, on all ranks: parameters, and what layers keep besides, such as running
/// averages. All ranks have the same kind of model. The values travel together, not one by one.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
///
/// let weights = tenfold::Group::threads(2, |group| {
///     let model = LinearConfig::new(3, 2).init(&Device::default()); // random values
///     let model = tenfold_burn::broadcast_model(&group, model, 1).expect("both ranks have this model");
///     Ok(model.weight.val().to_data().try_to_vec::<f32>().expect("it has 32-bit floats"))
/// })?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), tenfold::Error>(())
/// ```
///
/// # Errors
/// On all ranks if the models of two ranks differ in shapes or dtypes, or a dtype cannot be sent. If the group fails.
pub fn broadcast_model<M: Module>(group: &Group, model: M, root: Rank) -> Result<M> {
    // Layers keep the latest update of a running average apart until they need it. burn folds updates in when it makes a copy for
    // validation. One that is left would replace the values of `root` later.
    drop(model.valid());
    let read = || {
        let (mut params, mut all) = (Vec::new(), Vec::new());
        visit(&model, |found| {
            params.push(found.describe()?);
            all.push((found.data)()?);
            Ok(())
        })?;
        Ok((params, all))
    };
    let (params, mut all) = agree(group, read())?;
    raw::verify_params(group, &params)?;
    let pack = |data: &TensorData| with_element!(data.dtype(), T => to_buffer::<T>(data));
    let mut buffers = all.iter().map(pack).collect::<Result<Vec<Buffer>>>()?;
    let views = buffers.iter_mut().map(Buffer::lend).collect();
    ddp::broadcast_coalesced(group, views, root, ddp::BROADCAST_BYTES)?;
    for (data, buffer) in all.iter_mut().zip(&buffers) {
        with_element!(data.dtype(), T => from_buffer::<T>(data, buffer))?;
    }
    Ok(model.map(&mut Fill { all: all.into() }))
}

fn to_buffer<T: BurnElement + Element>(data: &TensorData) -> Result<Buffer> {
    Ok(Buffer::from_slice(data.as_slice::<T>()?))
}

fn from_buffer<T: BurnElement + Element>(data: &mut TensorData, buffer: &Buffer) -> Result<()> {
    data.as_mut_slice::<T>()?.copy_from_slice(buffer.as_slice::<T>());
    Ok(())
}

/// Every rank calls it with what it has prepared alone. If a rank has an error, all ranks fail, instead of waiting for it.
pub(crate) fn agree<T>(group: &Group, own: Result<T>) -> Result<T> {
    let mut failed = vec![false; group.size()];
    group.all_gather_into(&mut failed, &[own.is_err()])?;
    let own = own?;
    let ranks: Vec<Rank> = (0..group.size()).filter(|rank| failed[*rank]).collect();
    if ranks.is_empty() { Ok(own) } else { Err(Error::Peers(ranks)) }
}
