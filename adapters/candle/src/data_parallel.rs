//! Copies of a model that stay equal.

use std::fmt;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var, WithDType};
use candle_nn::{Optimizer, VarMap};
use tenfold::ddp::raw::Framework as _;
use tenfold::ddp::{self, Param, Reducer};
use tenfold::{Element, Group};

use crate::tensors::{broadcast, dtype_of, elements, with_element};
use crate::{Error, Result};

/// Keeps the copies of a model on all ranks equal.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Init, Optimizer as _, SGD, VarMap};
/// use tenfold::Group;
/// use tenfold_candle::DataParallel;
///
/// fn train(group: &Group) -> tenfold_candle::Result<f32> {
///     let variables = VarMap::new();
///     let slope = variables.get((), "slope", Init::Const(group.rank() as f64), DType::F32, &Device::Cpu)?;
///     let mut parallel = DataParallel::new(group, &variables)?; // every rank has rank 0's slope now
///     let mut optimizer = SGD::new(parallel.variables().to_vec(), 0.5)?;
///     let x = 1.0 + group.rank() as f64; // this rank's part of the batch
///     for _step in 0..50 {
///         let loss = ((&slope * x)? - 3.0 * x)?.sqr()?; // the slope should be 3
///         parallel.backward_step(&(loss * 0.1)?, &mut optimizer)?;
///     }
///     parallel.check_replicas()?;
///     Ok(slope.to_scalar()?)
/// }
/// let slopes = Group::threads(2, |group| Ok(train(&group).expect("both ranks are alive")))?;
/// assert!(slopes[0] == slopes[1] && (slopes[0] - 3.0).abs() < 0.01);
/// # Ok::<(), tenfold::Error>(())
/// ```
pub struct DataParallel {
    group: Group,
    reducer: Reducer,
    finds_unused: bool,
    variables: Vec<Var>,
}

impl DataParallel {
    /// For all variables of a model. Every rank calls it, and all ranks get the values of rank 0.
    ///
    /// # Errors
    /// If the models of two ranks differ, a dtype cannot be sent, or the group fails.
    pub fn new(group: &Group, variables: &VarMap) -> Result<Self> {
        Self::with_options(group, variables, ddp::Options::default())
    }

    /// The same with options of the reducer: the size of buckets, compression, unused parameters.
    ///
    /// # Errors
    /// See [`DataParallel::new`].
    pub fn with_options(group: &Group, variables: &VarMap, options: ddp::Options) -> Result<Self> {
        // `VarMap::all_vars` has another order in every process.
        let mut named: Vec<(String, Var)> = {
            let variables = variables.data().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect()
        };
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        let described = |(name, variable): &(String, Var)| {
            Ok(Param::new(name, variable.dims(), dtype_of(variable.dtype())?))
        };
        let params = named.iter().map(described).collect::<Result<Vec<Param>>>()?;
        let finds_unused = options.finds_unused_parameters();
        let reducer = Reducer::new(group, &params, options)?; // refuses models that differ
        let variables: Vec<Var> = named.into_iter().map(|(_, variable)| variable).collect();
        for variable in &variables {
            variable.set(&broadcast(group, variable, 0)?)?;
        }
        Ok(DataParallel { group: group.clone(), reducer, finds_unused, variables })
    }

    /// What is trained, in an order that all ranks have in common.
    pub fn variables(&self) -> &[Var] {
        &self.variables
    }

    /// The reducer, for what is not offered here: accumulation by [`Reducer::set_sync`], ranks without data by
    /// [`Reducer::shadow`], statistics.
    pub fn reducer(&mut self) -> &mut Reducer {
        &mut self.reducer
    }

    /// Computes the gradients of this rank's loss, averages them over all ranks, and makes a step with the averages. Every rank
    /// calls it.
    ///
    /// # Errors
    /// If candle fails, a parameter has no gradient, or the group fails.
    pub fn backward_step(&mut self, loss: &Tensor, optimizer: &mut impl Optimizer) -> Result<()> {
        let mut gradients = loss.backward()?;
        self.average(&mut gradients)?;
        Ok(optimizer.step(&gradients)?)
    }

    /// Replaces the gradients of this rank's loss by the averages over all ranks. Every rank calls it.
    ///
    /// candle returns all gradients at the end of its backward, so they are reduced then, in buckets.
    ///
    /// # Errors
    /// On all ranks if a parameter has no gradient on a rank and the options do not allow that. If the group fails.
    pub fn average(&mut self, gradients: &mut GradStore) -> Result<()> {
        let has_none = |number: &usize| gradients.get(&self.variables[*number]).is_none();
        let unused: Vec<usize> = (0..self.variables.len()).filter(has_none).collect();
        if self.finds_unused {
            self.reducer.start_backward_without(&unused)?;
        } else {
            self.reducer.start_backward()?; // `finish` names what is missing, on all ranks
        }
        for (number, variable) in self.variables.iter().enumerate().rev() {
            let Some(gradient) = gradients.get(variable) else { continue };
            with_element!(gradient.dtype(), T => hand_over::<T>(&mut self.reducer, number, gradient))?;
        }
        self.reducer.finish()?;
        for (number, variable) in self.variables.iter().enumerate() {
            if !self.reducer.is_used_anywhere(number) {
                continue; // it has no gradient on any rank
            }
            let average = with_element!(variable.dtype(), T => take::<T>(&self.reducer, number, variable))?;
            gradients.insert(variable, average);
        }
        Ok(())
    }

    /// Compares the bits of all parameters on all ranks, and returns a fingerprint of them. Every rank calls it.
    ///
    /// # Errors
    /// [`Error::Replicas`] on all ranks if they differ. If candle or the group fails.
    pub fn check_replicas(&self) -> Result<u64> {
        let mut own = 0xcbf2_9ce4_8422_2325; // FNV-1a
        for variable in &self.variables {
            with_element!(variable.dtype(), T => fold::<T>(&mut own, variable))?;
        }
        let mut all = vec![0; self.group.size()];
        self.group.all_gather_into(&mut all, &[own])?;
        let others: Vec<usize> = (1..all.len()).filter(|rank| all[*rank] != all[0]).collect();
        if others.is_empty() { Ok(own) } else { Err(Error::Replicas(others)) }
    }
}

fn hand_over<T: WithDType + Element>(reducer: &mut Reducer, number: usize, gradient: &Tensor) -> Result<()> {
    reducer.gradient_mut::<T>(number)?; // refuses another dtype
    let values = tenfold::Buffer::from_slice(&elements::<T>(gradient)?);
    Ok(reducer.grad_ready_from(number, values.as_bytes())?) // adds to what was accumulated
}

fn take<T: WithDType + Element>(reducer: &Reducer, number: usize, variable: &Var) -> Result<Tensor> {
    Ok(Tensor::from_slice(reducer.gradient::<T>(number)?, variable.shape(), variable.device())?)
}

/// Adds all bytes of a variable to a fingerprint.
fn fold<T: WithDType + Element>(print: &mut u64, variable: &Var) -> Result<()> {
    let values = tenfold::Buffer::from_slice(&elements::<T>(variable)?);
    for byte in values.as_bytes() {
        *print = (*print ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    Ok(())
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DataParallel({:?}, {:?})", self.group, self.reducer)
    }
}
