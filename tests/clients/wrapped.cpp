// Trains a residual network through the C++ wrapper: three losses, then the message of a batch without labels.
#include <cstdio>
#include <numeric>

#include "burnish.hpp"

int main(int, char **arguments) {
    std::vector<float> x(6 * 64, 0.5f);
    std::vector<std::int64_t> labels(6);
    std::iota(labels.begin(), labels.end(), 0);
    burnish_options options{};
    options.threads = 1;
    burnish::Session session(arguments[1], options);
    burnish::Session::Batch batch{burnish::tensor("x", x.data(), {6, 1, 8, 8}), burnish::tensor("labels", labels.data(), {6})};
    for (int step = 0; step < 3; step++) std::printf("%.9g\n", session.step(batch)["loss"]);
    session.save(std::string(arguments[2]) + "/cpp.safetensors", "{\"place\": 3}");
    batch.pop_back();
    try {
        session.step(batch);
    } catch (const burnish::InputError &error) {
        std::printf("InputError: %s\n", error.what());
    }
    return session.restore(std::string(arguments[2]) + "/cpp.safetensors") == "{\"place\": 3}" ? 0 : 1;
}
