// A thin wrapper of burnish.h for C++17: sessions that close themselves, and exceptions in place of statuses.
#ifndef BURNISH_HPP
#define BURNISH_HPP

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "burnish.h"

namespace burnish {

class Error : public std::runtime_error {
   public:
    Error(burnish_status status, const char *message) : std::runtime_error(message), status(status) {}
    const burnish_status status;
};
struct InputError : Error {
    using Error::Error;
};
struct ConfigurationError : Error {
    using Error::Error;
};
struct CheckpointError : Error {
    using Error::Error;
};
struct EngineError : Error {
    using Error::Error;
};
struct NonFiniteLossError : Error {
    using Error::Error;
};
struct UnsupportedOperatorError : Error {
    using Error::Error;
};

inline void check(burnish_status status) {
    switch (status) {
        case BURNISH_OK: return;
        case BURNISH_INPUT_ERROR: throw InputError(status, burnish_message());
        case BURNISH_CONFIGURATION_ERROR: throw ConfigurationError(status, burnish_message());
        case BURNISH_CHECKPOINT_ERROR: throw CheckpointError(status, burnish_message());
        case BURNISH_NON_FINITE_LOSS_ERROR: throw NonFiniteLossError(status, burnish_message());
        case BURNISH_UNSUPPORTED_OPERATOR_ERROR: throw UnsupportedOperatorError(status, burnish_message());
        case BURNISH_ENGINE_ERROR: break;
    }
    throw EngineError(status, burnish_message());
}

template <typename T>
struct dtype_of;
template <>
struct dtype_of<float> {
    static constexpr burnish_dtype value = BURNISH_FLOAT;
};
template <>
struct dtype_of<double> {
    static constexpr burnish_dtype value = BURNISH_DOUBLE;
};
template <>
struct dtype_of<std::int64_t> {
    static constexpr burnish_dtype value = BURNISH_INT64;
};
template <>
struct dtype_of<std::int32_t> {
    static constexpr burnish_dtype value = BURNISH_INT32;
};
template <>
struct dtype_of<std::uint8_t> {
    static constexpr burnish_dtype value = BURNISH_UINT8;
};

// An array of the caller, which is not copied and outlives the tensor, as does the name.
template <typename T>
burnish_tensor tensor(const char *name, T *data, const std::vector<std::int64_t> &shape) {
    if (shape.size() > BURNISH_MAX_RANK) throw InputError(BURNISH_INPUT_ERROR, "a tensor has more axes than BURNISH_MAX_RANK");
    burnish_tensor made{name, dtype_of<T>::value, shape.size(), {}, data};
    for (std::size_t axis = 0; axis < shape.size(); axis++) made.shape[axis] = shape[axis];
    return made;
}

// What a graph returned, valid until the next call of its session.
class Outputs {
   public:
    double operator[](const char *name) const { return burnish_number(&outputs, name); }
    const burnish_tensor *begin() const { return outputs.tensors; }
    const burnish_tensor *end() const { return outputs.tensors + outputs.count; }
    burnish_outputs outputs{};
};

class Session {
   public:
    using Batch = std::vector<burnish_tensor>;

    explicit Session(const std::string &folder, const burnish_options &options = {}) {
        burnish_session *opened;
        check(burnish_open(folder.c_str(), &options, &opened));
        session.reset(opened);
    }
    Outputs step(const Batch &batch) {
        Outputs result;
        check(burnish_step(session.get(), batch.data(), batch.size(), &result.outputs));
        return result;
    }
    Outputs evaluate(const Batch &batch, int flags = 0) {
        Outputs result;
        check(burnish_evaluate(session.get(), batch.data(), batch.size(), flags, &result.outputs));
        return result;
    }
    Outputs predict(const Batch &batch, int flags = 0) {
        Outputs result;
        check(burnish_predict(session.get(), batch.data(), batch.size(), flags, &result.outputs));
        return result;
    }
    bool has_features() const { return burnish_has_features(session.get()); }
    Outputs features(const Batch &batch) {
        Outputs result;
        check(burnish_features(session.get(), batch.data(), batch.size(), &result.outputs));
        return result;
    }
    void set(const std::string &name, double value) { check(burnish_set(session.get(), name.c_str(), value)); }
    std::int64_t step_count() const { return burnish_step_count(session.get()); }
    burnish_tensor state(const std::string &name) {
        burnish_tensor entry;
        check(burnish_state(session.get(), name.c_str(), &entry));
        return entry;
    }
    void write_state(const burnish_tensor &entry) { check(burnish_write_state(session.get(), &entry)); }
    void save(const std::string &path, const std::string &extra = "{}") {
        check(burnish_save(session.get(), path.c_str(), extra.c_str()));
    }
    std::string restore(const std::string &path) {
        check(burnish_restore(session.get(), path.c_str()));
        return burnish_extra(session.get());
    }
    void export_model(const std::string &path, int flags = 0) { check(burnish_export(session.get(), path.c_str(), flags)); }

   private:
    friend class FeatureCache;
    struct Close {
        void operator()(burnish_session *opened) const { burnish_close(opened); }
    };
    std::unique_ptr<burnish_session, Close> session;
};

// Features by the number of their sample. The session outlives it.
class FeatureCache {
   public:
    explicit FeatureCache(Session &session, std::size_t limit = 0) {
        burnish_cache *opened;
        check(burnish_cache_open(session.session.get(), limit, &opened));
        cache.reset(opened);
    }
    bool has(const std::vector<std::int64_t> &samples) const {
        return burnish_cache_has(cache.get(), samples.data(), samples.size());
    }
    // The features of samples; `batch` has their inputs, and may be empty where has(samples).
    Outputs features(const std::vector<std::int64_t> &samples, const Session::Batch &batch = {}) {
        Outputs result;
        check(burnish_cache_features(cache.get(), samples.data(), samples.size(), batch.data(), batch.size(), &result.outputs));
        return result;
    }
    std::int64_t computed() const { return burnish_cache_computed(cache.get()); }

   private:
    struct Close {
        void operator()(burnish_cache *opened) const { burnish_cache_close(opened); }
    };
    std::unique_ptr<burnish_cache, Close> cache;
};

}  // namespace burnish

#endif
