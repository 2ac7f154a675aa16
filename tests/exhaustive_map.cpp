// The map of a logit under a cap (csrc/logit.h), for the figures of section 12 of docs/SPEC.md.
//
//   g++ -O2 -std=c++17 -mfma -ffp-contract=off -pthread exhaustive_map.cpp -o exhaustive_map
//   ./exhaustive_map [threads, default 2] [stride, default 1] [bound of the error of tanh, as a power of two, default -22.18]
//
// tanh: every fp32 w in [2^-12, 32], every 16th in [2^-25, 2^-12). Below that it is a product of w with a constant (q is 1, d is 2): every 1024th float there.
// The map and its slope: for scales and caps of several kinds, every 4001st fp32 x of all there are; of one cap every x in [1/2, 4].
// (All times the stride.) Prints the extremes and exits 1 if anything that is promised does not hold.
//
// The reference is fp64's tanh, good to 2^-51: a 2^-27th of what is measured.
#include "../csrc/logit.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

namespace {

using dce::bits;
using dce::from_bits;

// The place of the last bit of an fp32 at this magnitude.
double ulp(double x) {
    int e;
    std::frexp(std::fabs(x), &e);
    return std::ldexp(1.0, std::max(e - 24, -149));
}

// Values in the order of their arguments: how far below an earlier one any of them is, in ulp of its own.
struct Falls {
    float greatest = -1, least = std::numeric_limits<float>::infinity(), least_at = 0, at = 0;
    double far = 0;
    int64_t count = 0;

    void from(float before, float value, float x) {
        if (!(value < before)) return;
        const double fall = ((double)before - (double)value) / ulp(value);
        if (fall > far) far = fall, at = x;
    }
    void take(float value, float x) {
        if (value < greatest) ++count, from(greatest, value, x);
        greatest = std::max(greatest, value);
        if (value < least) least = value, least_at = x;
    }
    // Values that all come after those here. The lowest of them is the one furthest below what is here.
    void follow(const Falls& next) {
        count += next.count;
        if (next.far > far) far = next.far, at = next.at;
        from(greatest, next.least, next.least_at);
        greatest = std::max(greatest, next.greatest);
    }
};

struct Report {
    int64_t tried = 0, outside = 0, not_odd = 0;
    double ulps = 0, rel = 0, slope = 0;  // of errors less what subnormal numbers on the way may cost
    float ulps_at = 0, rel_at = 0, slope_at = 0;
    Falls falls;
};

void measure(Report& out, double value, double exact, double subnormal, float x) {
    const double error = std::max(0.0, std::fabs(value - exact) - subnormal);
    if (error > out.ulps * ulp(exact)) out.ulps = error / ulp(exact), out.ulps_at = x;
    if (error > out.rel * std::fabs(exact)) out.rel = error / std::fabs(exact), out.rel_at = x;
}

void merge(Report& all, const Report& next) {
    all.tried += next.tried, all.outside += next.outside, all.not_odd += next.not_odd;
    if (next.ulps > all.ulps) all.ulps = next.ulps, all.ulps_at = next.ulps_at;
    if (next.rel > all.rel) all.rel = next.rel, all.rel_at = next.rel_at;
    if (next.slope > all.slope) all.slope = next.slope, all.slope_at = next.slope_at;
    all.falls.follow(next.falls);
}

// Splits the patterns [from, to] in equal pieces, one a thread, and puts the pieces' reports together in order.
template <class Visit>
Report walk(int64_t from, int64_t to, int64_t stride, int threads, Visit visit) {
    std::vector<Report> reports((size_t)threads);
    std::vector<std::thread> workers;
    const int64_t steps = (to - from) / stride + 1;
    for (int i = 0; i < threads; ++i) {
        workers.emplace_back([&, i] {
            Report report;  // its own until it is done: no line of the cache is shared
            for (int64_t k = steps * i / threads; k < steps * (i + 1) / threads; ++k) visit(report, from_bits((uint32_t)(from + k * stride)));
            reports[(size_t)i] = report;
        });
    }
    for (auto& worker : workers) worker.join();
    for (int i = 1; i < threads; ++i) merge(reports[0], reports[(size_t)i]);
    return reports[0];
}

void try_tanh(Report& out, float w) {
    const float t = dce::minus_tanh_half(w);
    ++out.tried;
    if (!(t <= 0 && t >= -1)) ++out.outside;
    measure(out, -(double)t, std::tanh(0.5 * (double)w), 0x1p-149, w);
    out.falls.take(-t, w);
}

void try_map(Report& out, const dce::LogitMap& map, double scale, double cap, float x) {
    const float y = dce::mapped(map, x);
    const double t = std::tanh(scale * (double)x / cap);
    ++out.tried;
    if (!(y >= 0 && y <= map.cap)) ++out.outside;
    if (bits(dce::mapped(map, -x)) != (bits(y) | 0x80000000u)) ++out.not_odd;
    measure(out, y, cap * t, (cap + 1) * 0x1p-149, x);
    const double slope = dce::slope_at(map, y), error = std::fabs(slope - (1 - t * t));
    if (!(slope >= 0 && slope <= 1)) ++out.outside;
    if (error > out.slope) out.slope = error, out.slope_at = x;
}

void print(const char* name, const Report& r) {
    std::printf("%-22s tried %lld, error %.4f ulp at %a, 2^%.4f relative at %a, slope %.4f * 2^-21 at %a\n", name, (long long)r.tried, r.ulps, r.ulps_at, std::log2(r.rel),
                r.rel_at, r.slope * 0x1p21, r.slope_at);
    if (r.falls.count) std::printf("%-22s %lld values below an earlier one, by up to %.0f ulp at %a\n", "", (long long)r.falls.count, r.falls.far, r.falls.at);
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
    const int64_t stride = argc > 2 ? std::atoll(argv[2]) : 1;
    const double tanh_bound = std::exp2(argc > 3 ? std::atof(argv[3]) : -22.18);
    bool good = true;
    auto check = [&](bool holds, const char* what) {
        if (!holds) std::printf("FAILED: %s\n", what), good = false;
    };

    Report tanh = walk(0, bits(0x1p-25f) - 1, 1024 * stride, threads, try_tanh);
    check(tanh.falls.count == 0, "tanh is monotone below 2^-25");
    merge(tanh, walk(bits(0x1p-25f), bits(0x1p-12f) - 1, 16 * stride, threads, try_tanh));
    merge(tanh, walk(bits(0x1p-12f), bits(32.0f), stride, threads, try_tanh));
    print("tanh", tanh);
    check(tanh.outside == 0, "-1 <= -tanh <= 0");
    check(tanh.rel <= tanh_bound && tanh.ulps <= 2.7, "the error of tanh is within the bound");
    check(tanh.falls.far <= 3, "tanh never falls by more than 3 ulp");

    // What the map adds to the error of tanh: its argument's two roundings, to which tanh is less sensitive than in proportion, and its own.
    const double map_bound = tanh_bound + 3 * 0x1p-24;
    const struct {
        double scale, cap;
    } maps[] = {{1, 30}, {1, 50}, {1, 15}, {1, 1}, {1, 20}, {0.5, 30}, {0.7f, 50}, {1.7f, 8}, {3, 1e4f}, {1e-3f, 1e-2f}, {1e-4f, 1e4f}, {1e4f, 30}, {1, 0x1.fffffep9}, {1, 0x1.000002p9}};
    Report all;
    for (const auto& given : maps) {
        const dce::LogitMap map = dce::make_map(given.scale, given.cap);
        merge(all, walk(0, dce::kInf32 - 1, 4001 * stride, threads, [&](Report& out, float x) { try_map(out, map, given.scale, given.cap, x); }));
        const float inf = std::numeric_limits<float>::infinity();
        for (float x : {inf, -inf, from_bits(dce::kNaN32)}) check(bits(dce::mapped(map, x)) == bits(x), "infinities and NaN are kept");
        check(dce::slope_at(map, -inf) == 0, "a masked column has no slope");
    }
    print("map, all kinds", all);
    const dce::LogitMap map = dce::make_map(1, 30);
    const Report dense = walk(bits(0.5f), bits(4.0f), stride, threads, [&](Report& out, float x) {
        try_map(out, map, 1, 30, x);
        out.falls.take(dce::mapped(map, x), x);
    });
    print("map, scale 1, cap 30", dense);
    check(dense.falls.far <= 5, "the map never falls by more than 5 ulp");
    merge(all, dense);
    check(all.outside == 0, "|map| <= cap, 0 <= slope <= 1");
    check(all.not_odd == 0, "map(-x) = -map(x)");
    check(all.rel <= map_bound, "the error of the map is within the bound");
    check(all.slope <= 0x1p-21, "the slope is within 2^-21");
    return good ? 0 : 1;
}
